// What a chat without messages shows: the model, things to ask, and where chats stay.
import { button, h } from "../lib/dom.js";
import { bytes, count, short } from "../lib/format.js";

const SUGGESTIONS = [
  "What is 17 + 25?",
  "Explain in three sentences how a cache saves time.",
  "Write a Python function that finds prime numbers, with a test.",
  "Draft a short, friendly email that declines an invitation.",
];

export class EmptyPage {
  /** suggest(text): puts a suggestion into the form. */
  constructor(suggest) {
    this.name = h("h2", {});
    this.facts = h("p", {});
    this.element = h(
      "div",
      { class: "empty" },
      this.name,
      this.facts,
      h(
        "ul",
        { class: "suggestions", "aria-label": "Suggestions" },
        ...SUGGESTIONS.map((text) => h("li", {}, button(text, () => suggest(text)))),
      ),
      h(
        "p",
        {},
        `Chats stay in this browser, for ${location.host} only: it keeps data apart by address, also if another address `,
        "leads to the same server. Export all and Import move them.",
      ),
    );
  }

  /** model: as the server lists it; null if that is not known. */
  show(model) {
    this.name.textContent = model?.id ?? "";
    this.facts.textContent = model === null ? "" : factsOf(model).join(" · ");
  }
}

function factsOf({ parameters, quantization, size_bytes: size, max_model_len: length, capabilities }) {
  const facts = [];
  if (parameters) facts.push(`${short(parameters)} parameters`);
  if (quantization) facts.push(quantization);
  if (size) facts.push(bytes(size));
  if (length) facts.push(`context of ${count(length)} tokens`);
  if (capabilities?.vision) facts.push("takes images");
  if (capabilities?.thinking) facts.push("thinks");
  return facts;
}
