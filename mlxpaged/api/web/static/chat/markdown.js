// Markdown to elements. The text comes from a model: nothing in it may run, load or look like a part of the page.
import { Marked } from "../vendor/marked/marked.esm.js";
import DOMPurify from "../vendor/dompurify/purify.es.mjs";
import { announce, button, h } from "../lib/dom.js";

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

const PURIFY = {
  ALLOWED_TAGS:
    "a b blockquote br code del details em h1 h2 h3 h4 h5 h6 hr i kbd li ol p pre s small strong sub summary sup " +
    "table tbody td th thead tr u ul",
  ALLOWED_ATTR: "align class href start title",
};
const CONFIG = {
  ALLOWED_TAGS: PURIFY.ALLOWED_TAGS.split(" "),
  ALLOWED_ATTR: PURIFY.ALLOWED_ATTR.split(" "),
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("rel", "noopener noreferrer");
    node.setAttribute("target", "_blank");
  }
  // The only class is the language of a code block: others would borrow the page's looks.
  if (node.hasAttribute?.("class") && !/^language-[\w+#.-]+$/.test(node.getAttribute("class"))) {
    node.removeAttribute("class");
  }
});

function escaped(text) {
  return text.replace(/[&<>"]/g, (char) => `&#${char.charCodeAt(0)};`);
}

function elements(token, links) {
  const tokens = [token];
  tokens.links = links;
  const fragment = DOMPurify.sanitize(marked.parser(tokens), CONFIG);
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) frameCode(code);
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

/** Shows a text that grows. Only the blocks that changed are made anew, so that a selection in the others stays. */
export class Markdown {
  constructor() {
    this.element = h("div", { class: "markdown" });
    this.raws = [];
  }

  show(text) {
    try {
      this.draw(text);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      // A model that repeats ">" nests quotes deeper than the parser's stack.
      this.element.replaceChildren(h("div", { class: "block plain" }, text));
      this.raws = [];
    }
  }

  draw(text) {
    const tokens = marked.lexer(text);
    const blocks = tokens.filter((token) => token.type !== "space");
    const linksChanged = JSON.stringify(tokens.links) !== this.links;
    this.links = JSON.stringify(tokens.links);
    blocks.forEach((token, index) => {
      if (this.raws[index] === token.raw && !linksChanged) return;
      const block = h("div", { class: "block" });
      block.append(elements(token, tokens.links));
      const old = this.element.children[index];
      if (old === undefined) this.element.append(block);
      else old.replaceWith(block);
      this.raws[index] = token.raw;
    });
    while (this.element.children.length > blocks.length) this.element.lastChild.remove();
    this.raws.length = blocks.length;
  }
}
