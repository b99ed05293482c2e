// Dark or light: as the system has it, unless the user chose one.
import { device } from "./storage.js";

const NAME = "mlxpaged-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const TEXT = { auto: "Auto", light: "Light", dark: "Dark" };

function chosen() {
  const theme = device.getItem(NAME);
  return theme in NEXT ? theme : "auto";
}

function apply(button) {
  const theme = chosen();
  document.documentElement.dataset.theme = theme;
  button.textContent = TEXT[theme];
  button.setAttribute("aria-label", `Colours: ${TEXT[theme].toLowerCase()}. Change to ${NEXT[theme]}`);
  document.dispatchEvent(new Event("theme-changed"));
}

export function startTheme(button) {
  button.addEventListener("click", () => {
    device.setItem(NAME, NEXT[chosen()]);
    apply(button);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => apply(button));
  apply(button);
}
