// The models that are loaded, and those that can be.
import { get, inPath, post } from "../lib/api.js";
import { announce, button, h } from "../lib/dom.js";
import { bytes, count } from "../lib/format.js";

export class Models {
  constructor() {
    this.list = h("ul", { class: "models" });
    this.problem = h("p", { class: "error-text", role: "alert", hidden: true });
    this.element = h("section", { class: "card" }, h("h2", {}, "Models"), this.problem, this.list);
    this.served = [];
    this.seen = "";
    this.acting = new Map(); // by id: what is being done
  }

  /** Asks for the list again only when the stream shows other models or states. */
  show(models) {
    this.loaded = new Map(models.map((model) => [model.id, model]));
    const seen = JSON.stringify(models.map(({ id, state }) => [id, state]));
    if (seen !== this.seen) {
      this.seen = seen;
      this.load();
    } else {
      this.draw();
    }
  }

  async load() {
    try {
      this.served = (await get("v1/models")).data;
    } catch (error) {
      this.fail(error);
    }
    this.draw();
  }

  fail(error) {
    this.problem.textContent = error.message;
    this.problem.hidden = false;
  }

  draw() {
    const ids = this.served.map((model) => model.id);
    const loading = [...this.loaded.values()].filter((model) => !ids.includes(model.id));
    const entries = [...this.served, ...loading];
    const drawn = JSON.stringify([entries, [...this.acting], [...this.loaded.values()].map(factsOfEngine)]);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    const focused = document.activeElement?.dataset?.model;
    this.list.replaceChildren(...entries.map((model) => this.row(model)));
    if (focused) this.list.querySelector(`[data-model="${CSS.escape(focused)}"]`)?.focus();
    if (entries.length === 0) this.list.append(h("li", {}, "This server has no model."));
  }

  row(model) {
    const engine = this.loaded.get(model.id);
    const state = this.acting.get(model.id) ?? model.state;
    const facts = [state];
    if (model.kind) facts.push(model.kind);
    if (model.source) facts.push(`type from ${model.source}`);
    if (model.size_bytes) facts.push(`${bytes(model.size_bytes)} of weights`);
    const memory = model.memory_bytes ?? engine?.memory_bytes;
    if (memory) facts.push(`${bytes(memory)} of memory`);
    if (engine?.kv_cache) facts.push(`KV cache ${bytes(engine.kv_cache.bytes)} of ${bytes(engine.kv_cache.max_bytes)}`);
    if (model.max_model_len) facts.push(`context ${count(model.max_model_len)}`);
    if (model.pinned) facts.push("pinned");
    const problem = model.error ?? engine?.reason ?? engine?.progress;
    return h(
      "li",
      {},
      h("div", { class: "head" }, h("strong", {}, model.id)),
      h("span", { class: "facts" }, facts.join(" · "), problem && h("span", { class: "error-text" }, ` ${problem}`)),
      this.action(model),
    );
  }

  action(model) {
    const load = model.state === "available" || model.state === "failed";
    if (!load && model.state !== "loaded") return null;
    const name = load ? "Load" : "Unload";
    return button(name, () => this.change(model, load ? "load" : "unload"), {
      "aria-label": `${name} ${model.id}`,
      "data-model": model.id,
      disabled: this.acting.has(model.id),
    });
  }

  async change(model, verb) {
    this.problem.hidden = true;
    this.acting.set(model.id, `${verb}ing`);
    this.draw();
    try {
      const entry = await post(`v1/models/${inPath(model.id)}/${verb}`);
      announce(`${model.id} is ${entry.state}`);
    } catch (error) {
      this.fail(error);
    }
    this.acting.delete(model.id);
    await this.load();
  }
}

function factsOfEngine({ id, state, reason, progress, kv_cache: pool, memory_bytes: memory }) {
  return [id, state, reason, progress, pool, memory];
}
