// Mathematics in Markdown: finds it, so that the parser leaves it as it is. What draws it is in typeset.js.
import { Lexer } from "../vendor/marked/marked.esm.js";

const DELIMITERS = [
  { open: "$$", close: "$$", display: true },
  { open: "\\[", close: "\\]", display: true },
  { open: "\\(", close: "\\)", display: false },
];
const ENVIRONMENT = /\\begin\{([a-zA-Z]+\*?)\}/y;
const SIGN = /[$\\]/g; // of a formula's begin, or of an escaped character
const BLANK_LINE = /\n[ \t]*(?:\n|$)/;

/** The formula that begins at a position of a text: {raw, tex, display, closed}, or null. One that is not closed reaches
 * to the end of the text: a model is still writing it. */
export function formulaAt(text, at = 0) {
  const found = delimiterAt(text, at);
  if (found === null) return text[at] === "$" ? dollarAt(text, at) : null;
  const { open, close, display, whole = false } = found;
  const from = at + open.length;
  const end = find(text, close, from);
  const inside = end === -1 ? text.slice(from) : text.slice(from, end);
  if (BLANK_LINE.test(inside.trimEnd())) return null; // a formula is within one paragraph
  if (end !== -1) {
    const raw = text.slice(at, end + close.length);
    return inside.trim() ? { raw, tex: whole ? raw : inside, display, closed: true } : null;
  }
  if (open === "$$" && /^[ \t]/.test(inside)) return null;
  const raw = text.slice(at).trimEnd();
  return { raw, tex: raw, display, closed: false };
}

function delimiterAt(text, at) {
  ENVIRONMENT.lastIndex = at;
  const environment = ENVIRONMENT.exec(text);
  if (environment !== null) {
    return { open: environment[0], close: `\\end{${environment[1]}}`, display: true, whole: true };
  }
  return DELIMITERS.find(({ open }) => text.startsWith(open, at)) ?? null;
}

/** A single $ is also the sign of a price, so there are rules: no white space inside of the signs, no digit after them,
 * and all on one line. "$5 and $10" is no formula. */
function dollarAt(text, at) {
  if (/^\s?$/.test(text.charAt(at + 1))) return null;
  const newline = text.indexOf("\n", at);
  const line = text.slice(at, newline === -1 ? text.length : newline);
  const end = find(line, "$", 1);
  if (end !== -1) {
    if (/\s/.test(line[end - 1]) || /\d/.test(line.charAt(end + 1))) return null;
    return { raw: line.slice(0, end + 1), tex: line.slice(1, end), display: false, closed: true };
  }
  if ((newline !== -1 && text.slice(newline).trim()) || /\d/.test(line[1])) return null;
  return { raw: line, tex: line, display: false, closed: false };
}

/** Where `close` stands without a backslash that escapes it, or -1. */
function find(text, close, from) {
  for (let at = text.indexOf(close, from); at !== -1; at = text.indexOf(close, at + 1)) {
    let slashes = 0;
    while (at - slashes > from && text[at - slashes - 1] === "\\") slashes += 1;
    if (slashes % 2 === 0) return at;
  }
  return -1;
}

/** marked takes * and _ of a formula for the end of an emphasis that began before it. So they are covered in the copy of
 * the text in which it looks for that end. mask: that copy, in which a code span has letters already, and an escaped
 * character and its backslash are "++". */
function covered(text, mask, allows) {
  let result = "";
  let from = 0;
  for (let at = next(text, 0); at !== -1; at = next(text, at)) {
    const escapes = text[at] === "\\";
    const formula = mask[at] === (escapes ? "+" : "$") ? formulaAt(text, at) : null;
    if (formula !== null && allows(formula)) {
      result += mask.slice(from, at) + "a".repeat(formula.raw.length);
      from = at += formula.raw.length;
    } else {
      at += escapes ? 2 : 1;
    }
  }
  return result + mask.slice(from);
}

function next(text, at) {
  SIGN.lastIndex = at;
  return SIGN.exec(text)?.index ?? -1;
}

/** marked's lexer, for texts with formulas. */
class FormulaLexer extends Lexer {
  inlineTokens(text, tokens) {
    this.inlineText = text; // the mask is made from it before anything else
    return super.inlineTokens(text, tokens);
  }
}

/** The tokens of a text. closedOnly: what is not closed is no formula. */
export function lex(marked, text, { closedOnly = false } = {}) {
  const hooks = {
    emStrongMask(mask) {
      return covered(this.lexer.inlineText, mask, allowed(this.lexer));
    },
  };
  return new FormulaLexer({ ...marked.defaults, hooks, closedOnly }).lex(text);
}

/** The option `closedOnly` of the lexer leaves out formulas that are not closed. */
function allowed(lexer) {
  return (formula) => formula.closed || !lexer.options.closedOnly;
}

/** An extension of marked. draw(formula) is its HTML. */
export function formulas(draw) {
  const inline = {
    name: "formula",
    level: "inline",
    start: (text) => text.search(/\$|\\[[(]/),
    tokenizer(text) {
      const formula = /^(?:\$|\\[[(])/.test(text) ? formulaAt(text) : null;
      if (formula !== null && allowed(this.lexer)(formula)) return { type: "formula", ...formula };
    },
    renderer: draw,
  };
  const block = {
    name: "formulaBlock",
    level: "block",
    start(text) {
      const found = /\n {0,3}(?:\$\$|\\\[|\\begin\{)/.exec(text);
      return found === null ? -1 : found.index + 1;
    },
    tokenizer(text) {
      const indent = /^ {0,3}(?=\$\$|\\\[|\\begin\{)/.exec(text)?.[0];
      const formula = indent === undefined ? null : formulaAt(text, indent.length);
      if (formula === null || !allowed(this.lexer)(formula)) return;
      const rest = /^[ \t]*(?:\n+|$)/.exec(text.slice(indent.length + formula.raw.length));
      if (rest === null) return; // text follows on the line, so it is a formula of a paragraph
      return { type: "formulaBlock", ...formula, raw: indent + formula.raw + rest[0], source: formula.raw };
    },
    renderer: (token) => `<p>${draw({ ...token, raw: token.source })}</p>\n`,
  };
  return { extensions: [inline, block] };
}
