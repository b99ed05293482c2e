// Colours code with highlight.js, which is loaded with the first block that has a language.
import { h } from "../lib/dom.js";
import { once } from "../lib/once.js";

const MAX_LENGTH = 50_000; // characters; a longer block stays plain
const PARTS = /<span class="([\w -]+)">|<\/span>|&(\w+|#x27);/g;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'" };
const library = once(async () => (await import("../vendor/highlightjs/highlight.min.js")).default);

/** code: an element of the class language-NAME. */
export function highlight(code) {
  const language = /^language-(\S+)$/.exec(code.className)?.[1] ?? null;
  const text = code.textContent;
  if (language === null || text.length > MAX_LENGTH) return;
  const highlighter = library(() => highlight(code));
  if (!highlighter?.getLanguage(language)) return;
  code.replaceChildren(...asNodes(highlighter.highlight(text, { language, ignoreIllegals: true }).value));
}

/** highlight.js writes nothing but spans and five entities, so no parser of HTML is needed. */
export function asNodes(html) {
  const root = h("span", {});
  let inner = root;
  let from = 0;
  for (const found of html.matchAll(PARTS)) {
    inner.append(html.slice(from, found.index));
    from = found.index + found[0].length;
    if (found[1]) {
      const span = h("span", { class: found[1] });
      inner.append(span);
      inner = span;
    } else if (found[2]) {
      inner.append(ENTITIES[found[2]] ?? found[0]);
    } else {
      inner = inner.parentElement ?? root;
    }
  }
  inner.append(html.slice(from));
  root.normalize();
  return [...root.childNodes];
}
