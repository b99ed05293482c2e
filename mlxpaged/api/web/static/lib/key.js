// The API key: kept for the tab, or on this device if the user says so. It is never in a URL.
import { ask } from "./dialog.js";
import { h, labelled } from "./dom.js";
import { device, tab } from "./storage.js";

const NAME = "mlxpaged-key";

export function key() {
  return tab.getItem(NAME) ?? device.getItem(NAME);
}

export function forgetKey() {
  tab.removeItem(NAME);
  device.removeItem(NAME);
}

function keep(value, onDevice) {
  forgetKey();
  (onDevice ? device : tab).setItem(NAME, value);
}

let asked = null;

/** Asks once, however many requests wait for the key. Returns whether there is a new one. */
export function askForKey(reason) {
  asked ??= askOnce(reason).finally(() => (asked = null));
  return asked;
}

async function askOnce(reason) {
  const field = h("input", {
    type: "password",
    name: "key",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    autofocus: true,
  });
  const device = h("input", { type: "checkbox", name: "device" });
  const content = h(
    "div",
    {},
    h("p", { role: "alert" }, reason),
    labelled("API key", field),
    h("label", { class: "check" }, device, h("span", {}, "Keep it on this device, not only in this tab")),
  );
  const given = await ask("API key", content, { accept: "Use key", read: () => field.value.trim() || null });
  if (given === null) return false;
  keep(given, device.checked);
  document.dispatchEvent(new Event("key-changed"));
  return true;
}
