// Draws one message of a conversation.
import { announce, button, h, labelled } from "../lib/dom.js";
import { count, plural, rate, seconds } from "../lib/format.js";
import { Attachments, fold } from "./files.js";
import { copyText, Markdown } from "./markdown.js";
import { placeOf } from "./versions.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };

function name(role, extra = null) {
  return h("h2", { class: "who" }, NAMES[role], extra);
}

export function userMessage(message, actions) {
  return h(
    "article",
    { class: `message ${message.role}` },
    name(message.role),
    (message.files ?? []).map(fold),
    message.content && h("div", { class: "plain" }, message.content),
    message.role === "user" &&
      h("div", { class: "under" }, switcher(message, actions), button("Edit", actions.edit, { class: "quiet" })),
  );
}

/** The buttons between the versions of a turn, or null if it has one. */
function switcher(message, { choose }) {
  const place = placeOf(message);
  if (place === null) return null;
  const { number, count: all } = place;
  const step = (by, sign, label) =>
    button(sign, () => choose(number + by), {
      class: "quiet",
      "aria-label": label,
      disabled: number + by < 1 || number + by > all,
    });
  return h(
    "span",
    { class: "versions", role: "group", "aria-label": "Versions" },
    step(-1, "‹", "Previous version"),
    h("span", {}, `${number} / ${all}`),
    step(1, "›", "Next version"),
  );
}

/** The form in place of a user's message. */
export function editor(message, { send, cancel, whyNoImages }) {
  const field = h("textarea", { rows: Math.min(12, message.content.split("\n").length + 1) });
  field.value = message.content;
  const attachments = new Attachments(() => field.focus(), whyNoImages, message.files);
  const form = h(
    "form",
    {
      class: "message user editing",
      onsubmit: (event) => {
        event.preventDefault();
        const text = field.value.trim();
        if ((text || attachments.files.length) && attachments.maySend()) send(text, attachments.files);
      },
      onkeydown: (event) => {
        if (event.key === "Escape") cancel();
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          form.requestSubmit();
        }
      },
    },
    labelled("Edit your message. The version before stays.", field),
    attachments.element,
    h(
      "div",
      { class: "actions" },
      button("Cancel", cancel),
      h("button", { type: "submit", class: "primary" }, "Send"),
    ),
  );
  return { element: form, focus: () => field.focus() };
}

/** An answer, which changes while it is streamed: call `update` after each change. */
export class AnswerMessage {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.markdown = new Markdown();
    this.markdown.element.classList.add("answer");
    this.reasoning = new Markdown();
    this.summary = h("summary", {});
    this.thinking = h("details", { class: "thinking", hidden: true }, this.summary, this.reasoning.element);
    this.calls = h("div", { class: "calls" });
    this.model = h("span", { class: "model" });
    this.note = h("p", { class: "note", hidden: true });
    this.under = h("div", { class: "under" });
    this.element = h(
      "article",
      { class: "message assistant" },
      name("assistant", this.model),
      this.thinking,
      this.markdown.element,
      this.calls,
      this.note,
      this.under,
    );
    this.drawn = 0; // milliseconds that the last drawing took
    this.update();
  }

  /** Draws soon. A long text is drawn less often, so that drawing takes a fifth of the time at most. */
  changed() {
    this.timer ??= setTimeout(() => this.update(), Math.max(40, this.drawn * 4));
  }

  update() {
    clearTimeout(this.timer);
    this.timer = null;
    const started = performance.now();
    const { content, model, reasoning, running } = this.message;
    this.model.textContent = model;
    this.thinking.hidden = !reasoning;
    if (reasoning) {
      this.summary.textContent = running && !content ? "Thinking…" : "Thinking";
      this.reasoning.show(reasoning, { complete: !running || Boolean(content) });
    }
    this.markdown.show(content, { complete: !running });
    this.element.setAttribute("aria-busy", running ? "true" : "false");
    this.element.classList.toggle("running", Boolean(running));
    this.showCalls();
    this.showNote();
    this.showUnder();
    this.drawn = performance.now() - started;
  }

  showCalls() {
    const { toolCalls, running } = this.message;
    const waiting = toolCalls.map((call) => !running && this.actions.waitsFor(call));
    const drawn = JSON.stringify([toolCalls, waiting]);
    if (drawn === this.drawnCalls) return;
    this.drawnCalls = drawn;
    this.calls.replaceChildren(
      ...toolCalls.map((call, index) => {
        const result = h("textarea", { rows: 2, class: "code" });
        const waits = waiting[index];
        return h(
          "section",
          { class: "call", "aria-label": `Call of ${call.function.name}` },
          h("h3", {}, "Calls ", h("code", {}, call.function.name)),
          h("pre", { tabindex: "0", role: "region", "aria-label": "Arguments" }, pretty(call.function.arguments)),
          waits && labelled("Result", result),
          waits && button("Give result", () => this.actions.giveResult(call, result.value)),
        );
      }),
    );
  }

  showNote() {
    const { comment, error, finish, progress, running, stopped } = this.message;
    let text = "";
    if (error) text = error;
    else if (running && progress) text = progressText(progress);
    else if (running && comment) text = `${comment[0].toUpperCase()}${comment.slice(1)}`; // "loading 1.2 of 3.4 GB"
    else if (stopped) text = "Stopped.";
    else if (finish === "length") text = "The answer reached its limit of tokens.";
    else if (!running && !finish) text = "This answer is not complete.";
    this.note.textContent = text;
    this.note.hidden = !text;
    this.note.classList.toggle("error", Boolean(error));
    if (error) this.note.setAttribute("role", "alert");
    else this.note.removeAttribute("role");
  }

  showUnder() {
    const { content, finish, running, stats, toolCalls } = this.message;
    if (this.stats === undefined) {
      this.versions = h("span", {});
      this.stats = h("span", { class: "stats" });
      this.copy = button("Copy", () => this.copyAnswer(), { class: "quiet" });
      this.again = button("Regenerate", this.actions.regenerate, { class: "quiet" });
      this.more = button("Continue", this.actions.goOn, { class: "quiet" });
      this.prompt = button("Prompt", this.actions.showPrompt, { class: "quiet", title: "The text that the model got" });
      this.under.append(this.versions, this.copy, this.again, this.more, this.prompt, this.stats);
    }
    const place = JSON.stringify(placeOf(this.message));
    if (place !== this.place) {
      this.place = place;
      this.versions.replaceChildren(...[switcher(this.message, this.actions)].filter(Boolean));
    }
    this.copy.hidden = running || !content;
    this.again.hidden = running || !this.actions.isLast();
    this.prompt.hidden = running;
    const isCut = finish === "length" || !finish; // by a limit, by the user, or by an error
    this.more.hidden = this.again.hidden || !isCut || !content || toolCalls.length > 0 || !this.actions.mayGoOn();
    this.stats.textContent = stats ? statsText(stats) : "";
  }

  async copyAnswer() {
    const copied = await copyText(this.message.content);
    announce(copied ? "Answer copied" : "The browser does not allow copying");
    this.copy.textContent = copied ? "Copied" : "Not allowed";
    setTimeout(() => (this.copy.textContent = "Copy"), 2000);
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is still being written
  }
}

function progressText({ total, processed, waiting_before: before }) {
  if (before !== null && before !== undefined) return `Waiting: ${plural(before, "request")} before this one.`;
  return `Reading the prompt: ${count(processed)} of ${plural(total, "token")}.`;
}

function statsText({ ttft, tokens, perSecond, promptTokens, cachedTokens }) {
  const parts = [];
  if (perSecond !== null) parts.push(`${rate(perSecond)} tokens/s`);
  if (ttft !== null) parts.push(`first token after ${seconds(ttft)}`);
  if (tokens !== null) parts.push(plural(tokens, "token"));
  if (promptTokens !== null) {
    const cached = cachedTokens ? `, ${count(cachedTokens)} of them cached` : "";
    parts.push(`prompt of ${count(promptTokens)}${cached}`);
  }
  return parts.join(" · ");
}
