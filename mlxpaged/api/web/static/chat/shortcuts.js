// The shortcuts of the chat, and the list of them.
import { h } from "../lib/dom.js";
import { tell } from "../lib/dialog.js";

const IS_MAC = /Mac|iPhone|iPad/.test(navigator.platform);
const CONTROL = IS_MAC ? "⌘" : "Ctrl";
const ALWAYS = [
  ["Enter", "sends the message"],
  ["Shift Enter", "begins a new line"],
  ["Escape", "stops the answer"],
];

/** Calls an action for its keys while the view is shown and no dialog is open. actions: {newChat, search, write}. */
export function startShortcuts(view, { newChat, search, write }) {
  const all = [
    { key: "o", shift: true, name: `${CONTROL} Shift O`, text: "begins a new chat", run: newChat },
    { key: "k", shift: false, name: `${CONTROL} K`, text: "searches the chats", run: search },
    { key: "Escape", shift: true, free: true, name: "Shift Escape", text: "goes to the message", run: write },
    { key: "/", shift: false, name: `${CONTROL} /`, text: "shows this list", run: () => show(all) },
  ];
  document.addEventListener("keydown", (event) => {
    if (!view.isConnected || document.querySelector("dialog[open]") || event.altKey) return;
    const control = IS_MAC ? event.metaKey : event.ctrlKey;
    const found = all.find(({ key, shift, free = false }) => {
      // On some keyboards, / needs Shift.
      return event.key.toLowerCase() === key.toLowerCase() && (event.shiftKey === shift || key === "/") && control !== free;
    });
    if (found === undefined) return;
    event.preventDefault();
    found.run();
  });
  return () => show(all);
}

function show(all) {
  const rows = [...all.map(({ name, text }) => [name, text]), ...ALWAYS];
  tell(
    "Keyboard shortcuts",
    h(
      "dl",
      { class: "shortcuts" },
      ...rows.map(([name, text]) =>
        h("div", {}, h("dt", {}, ...name.split(" ").flatMap((key) => [h("kbd", {}, key), " "])), h("dd", {}, text)),
      ),
    ),
  );
}
