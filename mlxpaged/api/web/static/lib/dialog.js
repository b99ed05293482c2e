// Dialogs: the browser keeps the focus inside, closes them with Escape, and gives the focus back.
import { button, h } from "./dom.js";

/** Shows a form in a dialog. Returns what `read` returns when the form is sent, or null if it is dismissed. accept: the
 * name of the button that sends it; null for none. */
export function ask(title, content, { accept, danger = false, dismiss = "Cancel", read = () => true }) {
  return new Promise((resolve) => {
    let result = null;
    const form = h(
      "form",
      {
        method: "dialog",
        onsubmit: (event) => {
          event.preventDefault();
          result = read();
          if (result !== null) dialog.close();
        },
      },
      h("h2", { id: "dialog-title" }, title),
      content,
      h(
        "div",
        { class: "actions" },
        button(dismiss, () => dialog.close()),
        accept && h("button", { type: "submit", class: danger ? "danger" : "primary" }, accept),
      ),
    );
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(result);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Shows something to read. */
export function tell(title, content) {
  return ask(title, content, { accept: null, dismiss: "Close" });
}

export function confirm(title, text, accept) {
  return ask(title, h("p", {}, text), { accept, danger: true });
}
