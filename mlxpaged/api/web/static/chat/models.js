// The picker of models: those of the server that can chat.
import { get } from "../lib/api.js";
import { h } from "../lib/dom.js";

/** Whether a model takes images. One that is not loaded may not say more than its kind. */
function sees({ capabilities, kind }) {
  return capabilities?.vision ?? kind === "vision";
}

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

  /** Why a model takes no images, and which ones do. Empty if it does, or if the server's list does not say. */
  whyNoImages(name) {
    const model = this.get(name);
    if (model === null || sees(model)) return "";
    const others = this.models.filter(sees).map(({ id }) => id);
    const rest = others.length ? `Choose a model that does: ${others.join(", ")}.` : "Nor does another model of this server.";
    return `${name} takes no images. ${rest}`;
  }

  get(name) {
    return this.models.find((model) => model.id === name) ?? null;
  }
}
