// Text files that go with a message: {name, text} each.
import { announce, button, h } from "../lib/dom.js";
import { bytes } from "../lib/format.js";

const MAX_BYTES = 500_000;

/** The content of a file. Throws an Error that says what is wrong with it. */
export async function readText(file) {
  if (file.size > MAX_BYTES) {
    throw new Error(`${file.name} is too large. A file may have up to ${bytes(MAX_BYTES)}.`);
  }
  const content = await file.arrayBuffer().catch(() => {
    throw new Error(`${file.name} cannot be read. Is it a folder?`);
  });
  let text = "\0";
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(content);
  } catch {
    // not UTF-8
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text in UTF-8. This server takes text only.`);
  if (!text.trim()) throw new Error(`${file.name} is empty.`);
  return { name: file.name.replace(/[\s`]+/g, " "), text };
}

/** The message as the model gets it: the files as blocks of code, and then what the user wrote. */
export function withFiles(content, files = []) {
  const blocks = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1); // longer than all in the file, so that none of them ends the block
    const language = /\.(\w+)$/.exec(name)?.[1] ?? "";
    return `${name}:\n${fence}${language}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...blocks, ...(content ? [content] : [])].join("\n\n");
}

/** A file in a message: its text unfolds. */
export function fold({ name, text }) {
  return h(
    "details",
    { class: "file" },
    h("summary", {}, name, " ", h("small", {}, size(text))),
    h("pre", { tabindex: "0", role: "region", "aria-label": name }, text),
  );
}

function size(text) {
  return bytes(new TextEncoder().encode(text).length);
}

/** The files of a message that is being written. */
export class Attachments {
  /** removed(): the user has removed one, and with it the button that had the focus. */
  constructor(removed, files = []) {
    this.removed = removed;
    this.list = h("ul", { class: "chips" });
    this.problem = h("p", { class: "note error", role: "alert", hidden: true });
    this.element = h("div", { class: "attachments" }, this.problem, this.list);
    this.ready = Promise.resolve(); // all files that were added have been read
    this.show(files);
  }

  show(files) {
    this.files = files;
    this.list.replaceChildren(
      ...files.map((file) => {
        const remove = () => {
          this.show(this.files.filter((each) => each !== file));
          announce(`${file.name} is removed`);
          this.removed();
        };
        const cross = button("×", remove, { class: "quiet", "aria-label": `Remove ${file.name}` });
        return h("li", {}, file.name, " ", h("small", {}, size(file.text)), cross);
      }),
    );
    this.list.hidden = files.length === 0;
  }

  add(files) {
    const all = [...files]; // a list of the browser's becomes empty after the event
    this.ready = this.ready.then(() => this.read(all));
  }

  async read(files) {
    const problems = [];
    for (const file of files) {
      try {
        const read = await readText(file);
        this.show([...this.files, read]);
        announce(`${read.name} is attached`);
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.problem.textContent = problems.join(" ");
    this.problem.hidden = problems.length === 0;
  }

  /** Returns the files, which are no longer attached. */
  take() {
    const files = this.files;
    this.problem.hidden = true;
    this.show([]);
    return files;
  }
}
