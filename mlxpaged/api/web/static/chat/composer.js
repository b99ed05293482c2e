// The form in which a message is written: the field, the files, and Send or Stop.
import { button, h } from "../lib/dom.js";
import { Attachments } from "./files.js";

const MAX_HEIGHT = 240; // pixels of the field; a longer text scrolls

export class Composer {
  /** actions: send(text, files); maySend(), which is false while an answer is written; stop(); whyNoImages();
   * earlierFiles(): those of the messages before. */
  constructor(actions) {
    this.actions = actions;
    this.field = h("textarea", {
      rows: 1,
      name: "message",
      "aria-label": "Message",
      placeholder: "Message",
      enterkeyhint: "send",
      oninput: () => this.fitField(),
      onkeydown: (event) => this.onKey(event),
      onpaste: (event) => this.takePasted(event),
    });
    this.attachments = new Attachments(() => this.focus(), actions.whyNoImages);
    this.chosen = h("input", { type: "file", multiple: true, hidden: true, onchange: () => this.takeChosen() });
    this.send = h("button", { type: "submit", class: "primary" }, "Send");
    this.stop = button("Stop", actions.stop, { hidden: true });
    this.element = h(
      "form",
      {
        class: "composer",
        onsubmit: (event) => {
          event.preventDefault();
          this.submit();
        },
      },
      this.attachments.element,
      this.chosen,
      button("+", () => this.chosen.click(), { "aria-label": "Attach files", title: "Attach text files and images" }),
      this.field,
      this.send,
      this.stop,
    );
  }

  focus() {
    this.field.focus();
  }

  /** runs: an answer is being written. */
  show(runs) {
    this.stop.hidden = !runs;
    this.send.hidden = runs;
  }

  fitField() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight + 2, MAX_HEIGHT)}px`;
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.element.requestSubmit();
    }
  }

  takeChosen() {
    this.attachments.add(this.chosen.files);
    this.chosen.value = ""; // the same file may be chosen again
    this.focus();
  }

  /** An image in the clipboard, such as a screenshot, is a file there. Cells of a table are a text, and an image of it
   * too: the text is pasted. A file that was copied may have its name as the text. */
  takePasted(event) {
    const { files } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain").trim();
    const names = Array.from(files, ({ name }) => name).join("\n");
    if (files.length === 0 || (text && text !== names)) return;
    event.preventDefault();
    this.attachments.add(files);
  }

  /** Takes files that are dropped anywhere on an element. */
  takeDrops(element) {
    const mark = (on) => element.classList.toggle("dropping", on);
    element.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      mark(true);
    });
    element.addEventListener("dragleave", (event) => mark(element.contains(event.relatedTarget)));
    element.addEventListener("drop", (event) => {
      mark(false);
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault(); // the browser would open the file
      this.attachments.add(event.dataTransfer.files);
      this.focus();
    });
  }

  isEmpty() {
    return !this.field.value && !this.attachments.files.length;
  }

  /** Puts a text into the field, which the user may change. */
  suggest(text) {
    this.field.value = text;
    this.fitField();
    this.focus();
  }

  /** Takes back what could not be sent, and says why. */
  giveBack(text, files, problem) {
    this.suggest(text);
    this.attachments.show(files);
    this.attachments.showProblem(problem);
  }

  async submit() {
    await this.attachments.ready;
    const text = this.field.value.trim();
    if ((!text && !this.attachments.files.length) || !this.actions.maySend()) return;
    if (!this.attachments.maySend(this.actions.earlierFiles())) return;
    this.field.value = "";
    this.fitField();
    this.actions.send(text, this.attachments.take());
  }
}
