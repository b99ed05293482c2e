// The list of conversations.
import { button, h, labelled } from "../lib/dom.js";
import { ask, confirm } from "../lib/dialog.js";
import { save } from "./transfer.js";

export class Sidebar {
  /** actions: add(), rename(conversation, title), remove(conversation), takeFile(file), showShortcuts(). */
  constructor(actions) {
    this.actions = actions;
    this.list = h("ul", {});
    this.none = h("p", { class: "note", role: "status" });
    this.search = h("input", {
      type: "search",
      "aria-label": "Search chats",
      placeholder: "Search",
      oninput: () => this.draw(),
    });
    this.chosen = h("input", { type: "file", accept: ".json", hidden: true, onchange: () => this.takeChosen() });
    this.element = h(
      "nav",
      { class: "sidebar", id: "conversations", "aria-label": "Conversations" },
      button("New chat", actions.add, { class: "wide" }),
      this.search,
      this.none,
      this.list,
      h(
        "div",
        { class: "foot" },
        this.chosen,
        button("Import", () => this.chosen.click(), { class: "quiet" }),
        button("Export all", () => save(this.all, "chats"), { class: "quiet" }),
        button("Shortcuts", actions.showShortcuts, { class: "quiet" }),
      ),
    );
    this.show([], null);
  }

  takeChosen() {
    this.actions.takeFile(this.chosen.files[0]);
    this.chosen.value = ""; // the same file may be chosen again
  }

  show(conversations, current) {
    this.all = conversations;
    this.current = current;
    this.search.hidden = conversations.length === 0;
    this.draw();
  }

  /** Draws the conversations that have all words of the search. */
  draw() {
    const words = this.search.hidden ? [] : this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.all.filter((each) => hasAll(each, words));
    this.none.textContent = found.length === 0 && words.length > 0 ? "No chat has these words." : "";
    this.list.replaceChildren(
      ...found.map((each) => {
        const menu = h(
          "details",
          { class: "menu" },
          h("summary", { "aria-label": `Actions of ${each.title}` }, "…"),
          h(
            "div",
            { class: "menu-items" },
            button("Rename", () => this.rename(each)),
            button("Export", () => save(each, each.title)),
            button("Delete", () => this.remove(each)),
          ),
        );
        menu.addEventListener("focusout", (event) => {
          if (!menu.contains(event.relatedTarget)) menu.open = false;
        });
        menu.addEventListener("keydown", (event) => {
          if (event.key !== "Escape") return;
          menu.open = false;
          menu.firstElementChild.focus();
        });
        const link = h("a", { href: `#/chat/${each.id}`, "aria-current": each === this.current && "page" }, each.title);
        return h("li", {}, link, menu);
      }),
    );
  }

  async rename(conversation) {
    const field = h("input", { name: "title", required: true, maxlength: 200, autofocus: true });
    field.value = conversation.title;
    const read = () => field.value.trim() || null;
    const title = await ask("Rename chat", labelled("Name", field), { accept: "Rename", read });
    if (title !== null) this.actions.rename(conversation, title);
  }

  async remove(conversation) {
    const text = `“${conversation.title}” is deleted from this browser. It is nowhere else.`;
    if (await confirm("Delete chat?", text, "Delete")) this.actions.remove(conversation);
  }
}

/** Whether the title and the shown messages have all words. */
function hasAll({ title, messages }, words) {
  if (words.length === 0) return true;
  const text = [title, ...messages.map(({ content }) => content)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}
