// Shows one of the views, by the address after #.
import { announce } from "./lib/dom.js";
import { askForKey, forgetKey, key } from "./lib/key.js";
import { startTheme } from "./lib/theme.js";
import { ChatView } from "./chat/view.js";
import { ModelsView } from "./models/view.js";
import { ServerView } from "./server/view.js";

const main = document.getElementById("main");
const views = { chat: new ChatView(), models: new ModelsView(), server: new ServerView() };
const NAMES = { chat: "Chat", models: "Models", server: "Server" };
let shown = null;

function show() {
  const [, name = "chat", rest = ""] = location.hash.split("/");
  const view = Object.hasOwn(views, name) ? name : "chat";
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown !== view) {
    if (shown !== null) {
      views[shown].leave();
      announce(`${NAMES[view]} view`);
      main.focus();
    }
    main.replaceChildren(views[view].element);
    main.dataset.view = shown = view;
  }
  document.title = `${NAMES[view]} – mlxpaged`;
  views[view].enter(rest);
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address keeps the view
  main.focus();
});

const keyButton = document.getElementById("key-button");

function showKeyButton() {
  keyButton.textContent = key() === null ? "Key" : "Forget key";
}

keyButton.addEventListener("click", async () => {
  if (key() === null) {
    await askForKey("A server with API keys shows its data only with one of them.");
  } else {
    forgetKey();
    announce("The key is forgotten");
  }
  showKeyButton();
});
document.addEventListener("key-changed", showKeyButton);
showKeyButton();

startTheme(document.getElementById("theme-button"));
addEventListener("hashchange", show);
show();
