// Markdown to elements. The text comes from a model, so all of it goes through sanitize.js.
import { Marked } from "../vendor/marked/marked.esm.js";
import { announce, button, h } from "../lib/dom.js";
import { formulas, lex } from "./formulas.js";
import { highlight } from "./highlight.js";
import { cleanMarkdown } from "./sanitize.js";
import { typeset } from "./typeset.js";

const HARMLESS = /^<\/?(?:b|br|details|em|i|kbd|s|small|strong|sub|summary|sup|u)\s*\/?>$/i;
const marked = new Marked({
  gfm: true,
  renderer: {
    // Tags that a model writes are shown as text, except simple ones.
    html({ text }) {
      return text.replace(/<[^>]*>?/g, (tag) => (HARMLESS.test(tag.trim()) ? tag : tag.replace(/</g, "&lt;")));
    },
    // The page asks no other server for anything, so an image is a link to it.
    image({ href, text }) {
      const link = marked.parseInline(`[image](<${href.replace(/[<>\n]/g, "")}>)`);
      return `${link}${text ? ` (${escaped(text)})` : ""}`;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
  },
});

marked.use(formulas(({ raw, closed }) => `<span class="formula${closed ? "" : " open"}">${escaped(raw)}</span>`));

function escaped(text) {
  return text.replace(/[&<>"]/g, (char) => `&#${char.charCodeAt(0)};`);
}

function elements(token, links) {
  const tokens = [token];
  tokens.links = links;
  const fragment = cleanMarkdown(marked.parser(tokens));
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) frameCode(code);
  for (const formula of fragment.querySelectorAll(".formula")) typeset(formula);
  return fragment;
}

function frameCode(code) {
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "text";
  const pre = code.parentElement;
  pre.setAttribute("tabindex", "0"); // long lines scroll
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", `Code: ${language}`);
  const copy = button("Copy", async () => {
    const copied = await copyText(code.textContent);
    copy.textContent = copied ? "Copied" : "Not allowed";
    announce(copied ? "Code copied" : "The browser does not allow copying");
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  }, { class: "quiet" });
  const frame = h("div", { class: "code-block" }, h("div", { class: "code-bar" }, h("span", {}, language), copy));
  pre.replaceWith(frame);
  frame.append(pre);
}

/** Browsers give the clipboard's API only to https and localhost. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h("textarea", { class: "hidden", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    return copied;
  }
}

const MOST_CHARS = 200_000; // a longer text is shown as it is
const MOST_MS = 1000; // so is the rest of one of which a drawing took longer: each further one would take longer still

/** Shows a text that grows. Only the blocks that changed are made anew, so that a selection in the others stays. */
export class Markdown {
  constructor() {
    this.element = h("div", { class: "markdown" });
    this.isSlow = false;
    this.clear();
  }

  clear() {
    this.blocks = []; // the elements: to find the n-th child takes the browser n steps after each change
    this.raws = [];
    this.finished = []; // by block: nothing more comes for it
  }

  show(text, { complete }) {
    if (this.isSlow || text.length > MOST_CHARS) {
      this.showPlain(text);
      return;
    }
    const started = performance.now();
    try {
      this.draw(text, complete);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      this.showPlain(text); // a model that repeats ">" nests quotes deeper than the parser's stack
    }
    this.isSlow = !complete && performance.now() - started > MOST_MS;
  }

  showPlain(text) {
    this.element.replaceChildren(h("div", { class: "block plain" }, text));
    this.clear();
  }

  draw(text, complete) {
    const tokens = lex(marked, text);
    const blocks = tokens.filter((token) => token.type !== "space");
    const linksChanged = JSON.stringify(tokens.links) !== this.links;
    this.links = JSON.stringify(tokens.links);
    if (this.blocks.length === 0) this.element.replaceChildren();
    blocks.forEach((token, index) => {
      const isLast = index === blocks.length - 1;
      if (this.raws[index] !== token.raw || linksChanged) {
        const block = h("div", { class: "block" }, elements(token, tokens.links));
        const old = this.blocks[index];
        if (old === undefined) this.element.append(block);
        else old.replaceWith(block);
        this.blocks[index] = block;
        this.raws[index] = token.raw;
        this.finished[index] = false;
      }
      if (!this.finished[index] && (!isLast || complete)) {
        finish(this.blocks[index], token, isLast);
        this.finished[index] = true;
      }
    });
    for (const block of this.blocks.splice(blocks.length)) block.remove();
    this.raws.length = this.finished.length = blocks.length;
  }
}

/** Draws what waits until a block is complete: colours, and Markdown after signs that turned out to begin no formula. At
 * the end of the text, only a single $ is such a sign: with the others, the model has stopped within a formula. */
function finish(block, token, isLast) {
  const open = block.querySelector(".formula.open")?.textContent ?? null;
  if (open !== null && (!isLast || /^\$(?!\$)/.test(open))) {
    const tokens = lex(marked, token.raw, { closedOnly: true });
    block.replaceChildren(...tokens.map((each) => elements(each, tokens.links)));
  }
  for (const code of block.querySelectorAll("pre > code")) highlight(code);
}
