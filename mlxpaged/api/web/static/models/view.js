// The models with a short name: what fits this machine, what each is for, and their downloads.
import { h } from "../lib/dom.js";
import { Downloads } from "./downloads.js";

export class ModelsView {
  constructor() {
    this.downloads = new Downloads();
    this.element = h(
      "div",
      { class: "server" },
      h("div", { class: "server-head" }, h("h1", {}, "Models")),
      h(
        "p",
        { class: "soft" },
        "Those on this machine are loaded and unloaded in the ",
        h("a", { href: "#/server" }, "Server view"),
        ".",
      ),
      this.downloads.element,
    );
    document.addEventListener("key-changed", () => this.element.isConnected && this.downloads.load());
  }

  enter() {
    this.downloads.load();
  }

  leave() {}
}
