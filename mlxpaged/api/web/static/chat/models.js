// The picker of models: those of the server that can chat.
import { get } from "../lib/api.js";
import { h } from "../lib/dom.js";

const STATES = { loading: "is loading", available: "loads on first use", failed: "failed to load" };

export class ModelPicker {
  constructor(chosen) {
    this.models = [];
    this.element = h("select", { "aria-label": "Model", name: "model", onchange: () => chosen(this.element.value) });
  }

  /** Throws ApiError. */
  async load() {
    const { data } = await get("v1/models");
    this.models = data.filter((model) => model.capabilities?.chat ?? ["text", "vision"].includes(model.kind));
  }

  /** Shows `name` as chosen, also if the server does not have it now. Returns the chosen model's name or null. */
  show(name) {
    const options = this.models.map(({ id, state }) => {
      const text = state in STATES ? `${id} (${STATES[state]})` : id;
      return h("option", { value: id }, text);
    });
    if (name && !this.get(name)) options.push(h("option", { value: name }, `${name} (not served now)`));
    if (options.length === 0) options.push(h("option", { value: "" }, "no model"));
    this.element.replaceChildren(...options);
    this.element.value = name || this.models[0]?.id || "";
    return this.element.value || null;
  }

  get(name) {
    return this.models.find((model) => model.id === name) ?? null;
  }
}
