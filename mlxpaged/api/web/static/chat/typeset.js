// Draws formulas with Temml, which is loaded with the first of them.
import { once } from "../lib/once.js";
import { formulaAt } from "./formulas.js";
import { cleanFormula } from "./sanitize.js";

const MAX_LENGTH = 10_000; // characters; a longer formula stays text
const MAX_DRAWN = 500;
const OPTIONS = { throwOnError: true, trust: false, maxSize: [5, 40], maxExpand: 500 };
const STYLES = new URL("../vendor/temml/Temml-STIX2.css", import.meta.url);
const temml = once(async () => {
  const [library, styles] = await Promise.all([import("../vendor/temml/temml.mjs"), load(STYLES)]);
  document.adoptedStyleSheets.push(styles);
  return library.default;
});
const drawn = new Map(); // by source, because a paragraph is drawn again while it grows

/** Replaces the source of a formula by the formula. One that is not closed or not valid stays as it is. */
export function typeset(element) {
  const source = element.textContent;
  const formula = formulaAt(source);
  if (formula === null || !formula.closed || source.length > MAX_LENGTH) return;
  const library = temml(() => typeset(element));
  if (library === null) return;
  if (!drawn.has(source)) {
    if (drawn.size >= MAX_DRAWN) drawn.clear();
    drawn.set(source, draw(library, formula));
  }
  const picture = drawn.get(source);
  if (picture === null) return;
  element.replaceChildren(picture.cloneNode(true));
  element.classList.toggle("display", formula.display);
  element.classList.add("drawn");
}

function draw(library, { tex, display }) {
  const frame = document.createElement("span");
  try {
    library.render(tex, frame, { ...OPTIONS, displayMode: display });
  } catch {
    return null; // not valid, or nested deeper than the parser's stack
  }
  const fragment = document.createDocumentFragment();
  for (const child of [...frame.children]) fragment.append(cleanFormula(child));
  return fragment;
}

/** A stylesheet without its fonts. Their files are not vendored, and browsers ask for them even if no text uses them. */
async function load(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url} is not there`);
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(await response.text());
  for (let index = sheet.cssRules.length - 1; index >= 0; index -= 1) {
    if (sheet.cssRules[index] instanceof CSSFontFaceRule) sheet.deleteRule(index);
  }
  return sheet;
}
