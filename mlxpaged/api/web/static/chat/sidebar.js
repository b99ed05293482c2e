// The list of conversations.
import { button, h, labelled } from "../lib/dom.js";
import { ask, confirm } from "../lib/dialog.js";

export class Sidebar {
  /** actions: add(), rename(conversation, title), remove(conversation). */
  constructor(actions) {
    this.actions = actions;
    this.list = h("ul", {});
    this.element = h(
      "nav",
      { class: "sidebar", id: "conversations", "aria-label": "Conversations" },
      button("New chat", actions.add, { class: "wide" }),
      this.list,
    );
  }

  show(conversations, current) {
    this.list.replaceChildren(
      ...conversations.map((each) => {
        const menu = h(
          "details",
          { class: "menu" },
          h("summary", { "aria-label": `Actions of ${each.title}` }, "…"),
          h(
            "div",
            { class: "menu-items" },
            button("Rename", () => this.rename(each)),
            button("Export", () => download(each)),
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
        const link = h("a", { href: `#/chat/${each.id}`, "aria-current": each === current && "page" }, each.title);
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

function download(conversation) {
  const blob = new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" });
  const url = URL.createObjectURL(blob);
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60);
  h("a", { href: url, download: `${name || "chat"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
