// Models that can be downloaded. Those with a short name are shown also if the server does not let this page download.
import { get, request } from "../lib/api.js";
import { announce, button, h } from "../lib/dom.js";
import { bytes, short } from "../lib/format.js";

export class Downloads {
  constructor() {
    this.list = h("ul", { class: "downloads" });
    this.problem = h("p", { class: "error-text", role: "alert", hidden: true });
    this.name = h("input", { type: "text", "aria-label": "Repository", placeholder: "OWNER/NAME", autocomplete: "off" });
    this.form = h("form", { onsubmit: (event) => this.submit(event) }, this.name, " ", h("button", {}, "Download"));
    this.note = h("p", { class: "soft" });
    this.fitting = h("input", { type: "checkbox", checked: true, onchange: () => this.draw() });
    this.limit = h("span", {});
    this.filter = h("label", { class: "check" }, this.fitting, this.limit);
    this.element = h(
      "section",
      { class: "card" },
      h("h2", {}, "Download a model"),
      this.form,
      this.note,
      this.problem,
      this.filter,
      this.list,
    );
    this.models = [];
    this.allowed = false;
    this.progress = new Map(); // by the name that was asked for: what is shown
  }

  async load() {
    try {
      const { allowed, memory_bytes: memory, data } = await get("v1/downloads");
      this.allowed = allowed;
      this.models = data;
      this.form.hidden = !allowed;
      this.filter.hidden = data.length === 0;
      this.limit.textContent = `only those whose weights fit into ${bytes(memory)}, the memory without other models`;
      this.note.textContent = noteOf(allowed, data);
      this.note.hidden = !this.note.textContent;
    } catch (error) {
      this.fail(error.message);
    }
    this.draw();
  }

  fail(text) {
    this.problem.textContent = text;
    this.problem.hidden = false;
  }

  draw() {
    const named = this.models.map((model) => model.id);
    const others = [...this.progress.keys()].filter((name) => !named.includes(name)).map((id) => ({ id, fits: true }));
    const focused = document.activeElement?.dataset?.download;
    const shown = this.models.filter(({ fits }) => fits || !this.fitting.checked);
    this.list.replaceChildren(...[...others, ...shown].map((model) => this.row(model)));
    if (focused) this.list.querySelector(`[data-download="${CSS.escape(focused)}"]`)?.focus();
  }

  row(model) {
    const running = this.progress.get(model.id);
    const facts = [];
    if (model.good_for) facts.push(model.good_for);
    if (model.parameters) facts.push(`${short(model.parameters)} parameters`);
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
      model.downloaded || !model.fits || !this.allowed
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
      this.fail(`${name}: ${error.message}`);
    }
    this.progress.delete(name);
    await this.load();
  }

  show(name, text) {
    this.progress.set(name, text);
    this.draw();
  }
}

function noteOf(allowed, data) {
  if (data.length === 0) return "A server with API keys shows them with an admin key, another one only on its own machine.";
  return allowed ? "" : "This server downloads none: start it with --allow-downloads, or use “mlxpaged pull NAME”.";
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
