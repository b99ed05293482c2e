// Shows the prompt of an answer, as the model's chat template makes it.
import { request } from "../lib/api.js";
import { tell } from "../lib/dialog.js";
import { h } from "../lib/dom.js";
import { asRequest } from "./conversations.js";
import { fields } from "./settings.js";

/** The prompt is made again, from the messages before the answer and the settings as they are now. */
export async function showPrompt(conversation, answer) {
  const { messages, model, settings } = conversation;
  const before = { ...conversation, messages: messages.slice(0, messages.indexOf(answer)) };
  const body = { model: answer.model || model, messages: asRequest(before), ...fields(settings) };
  let shown;
  try {
    const { prompt } = await (await request("apply-template", { method: "POST", body })).json();
    shown = h("pre", { class: "prompt", tabindex: "0", role: "region", "aria-label": "Prompt" }, prompt);
  } catch (error) {
    shown = h("p", { class: "note error", role: "alert" }, error.message);
  }
  tell("The prompt of this answer, with the settings of now", shown);
}
