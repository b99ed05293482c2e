// Models that can be downloaded, if the server allows it to this page.
import { get, request } from "../lib/api.js";
import { announce, button, h } from "../lib/dom.js";
import { bytes } from "../lib/format.js";

export class Downloads {
  constructor() {
    this.list = h("ul", { class: "downloads" });
    this.problem = h("p", { class: "error-text", role: "alert", hidden: true });
    this.name = h("input", { type: "text", "aria-label": "Repository", placeholder: "OWNER/NAME", autocomplete: "off" });
    const form = h("form", { onsubmit: (event) => this.submit(event) }, this.name, " ", h("button", {}, "Download"));
    this.element = h(
      "section",
      { class: "card", hidden: true },
      h("h2", {}, "Download a model"),
      form,
      this.problem,
      h("details", {}, h("summary", {}, "Models with a short name"), this.list),
    );
    this.models = [];
    this.progress = new Map(); // by the name that was asked for: what is shown
  }

  async load() {
    try {
      const { allowed, data } = await get("v1/downloads");
      this.element.hidden = !allowed;
      this.models = data;
    } catch {
      this.element.hidden = true; // the view shows why the server does not answer
    }
    this.draw();
  }

  draw() {
    const named = this.models.map((model) => model.id);
    const others = [...this.progress.keys()].filter((name) => !named.includes(name)).map((id) => ({ id, fits: true }));
    const focused = document.activeElement?.dataset?.download;
    this.list.replaceChildren(...[...others, ...this.models].map((model) => this.row(model)));
    if (focused) this.list.querySelector(`[data-download="${CSS.escape(focused)}"]`)?.focus();
  }

  row(model) {
    const running = this.progress.get(model.id);
    const facts = [];
    if (model.size_bytes) facts.push(bytes(model.size_bytes));
    if (model.kind && model.kind !== "text") facts.push(model.kind);
    if (model.source) facts.push(`type from ${model.source}`);
    if (model.downloaded) facts.push("downloaded");
    if (!model.fits) facts.push("larger than the memory");
    if (running) facts.push(running);
    return h(
      "li",
      {},
      h("div", { class: "head" }, h("strong", {}, model.id)),
      h("span", { class: "facts" }, facts.join(" · ")),
      model.downloaded || !model.fits
        ? null
        : button("Download", () => this.download(model.id), {
            "aria-label": `Download ${model.id}`,
            "data-download": model.id,
            disabled: this.progress.has(model.id),
          }),
    );
  }

  submit(event) {
    event.preventDefault();
    const name = this.name.value.trim();
    if (name && !this.progress.has(name)) this.download(name);
  }

  async download(name) {
    this.problem.hidden = true;
    this.show(name, "asking the hub");
    try {
      const response = await request("api/pull", { method: "POST", body: { model: name } });
      for await (const { status, total, completed, error } of lines(response.body)) {
        if (error) throw new Error(error);
        if (total) this.show(name, `${bytes(completed)} of ${bytes(total)}`);
        else if (status === "success") announce(`${name} is downloaded`);
      }
    } catch (error) {
      this.problem.textContent = `${name}: ${error.message}`;
      this.problem.hidden = false;
    }
    this.progress.delete(name);
    await this.load();
  }

  show(name, text) {
    this.progress.set(name, text);
    this.element.querySelector("details").open = true;
    this.draw();
  }
}

/** The objects of a stream that has one on each line. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) if (part) yield JSON.parse(part);
  }
}
