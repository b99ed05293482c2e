// Files that go with a message: {name, text} each, or {name, image} with the image as a data: URL.
import { announce, button, h } from "../lib/dom.js";
import { bytes } from "../lib/format.js";

const MAX_BYTES = 500_000;
const MAX_IMAGE_BYTES = 10_000_000; // a server takes requests of 32 MiB, unless it is told otherwise
const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

const DECODED = /^image\/(?!svg)/; // other images, if the browser has a decoder for them
const MAX_SIDE = 4096; // pixels of such an image; a canvas of a phone has a limit

/** The content of a file. Throws an Error that says what is wrong with it. */
export function readFile(file) {
  if (IMAGES.includes(file.type)) return readImage(file);
  return DECODED.test(file.type) || /\.hei[cf]$/i.test(file.name) ? decodeImage(file) : readText(file);
}

/** An image that the server does not take, such as HEIC, as a JPEG. */
async function decodeImage(file) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} cannot be read: this browser has no decoder for it. Safari reads HEIC.`);
  });
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return { name: nameOf(file), image: canvas.toDataURL("image/jpeg", 0.92) };
}

async function readImage(file) {
  if (file.size > MAX_IMAGE_BYTES) {
    throw new Error(`${file.name} is too large. An image may have up to ${bytes(MAX_IMAGE_BYTES)}.`);
  }
  const image = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
  return { name: nameOf(file), image };
}

function nameOf(file) {
  return file.name.replace(/[\s`]+/g, " ");
}

async function readText(file) {
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
  if (text.includes("\0")) throw new Error(`${file.name} is neither a text in UTF-8 nor a PNG, JPEG, WEBP or GIF image.`);
  if (!text.trim()) throw new Error(`${file.name} is empty.`);
  return { name: nameOf(file), text };
}

/** The message as the API takes it: the images, the other files as blocks of code, and then what the user wrote. */
export function withFiles(content, files = []) {
  const text = withTexts(content, files.filter((file) => file.image === undefined));
  const images = files.filter((file) => file.image !== undefined);
  if (images.length === 0) return text;
  const parts = images.map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

function withTexts(content, files) {
  const blocks = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1); // longer than all in the file, so that none of them ends the block
    const language = /\.(\w+)$/.exec(name)?.[1] ?? "";
    return `${name}:\n${fence}${language}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...blocks, ...(content ? [content] : [])].join("\n\n");
}

/** A file in a message: its text unfolds. */
export function fold({ name, text, image }) {
  if (image !== undefined) return h("img", { class: "file", src: image, alt: name, title: name });
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
  /** removed(): the user has removed one, and with it the button that had the focus. whyNoImages(): why images are
   * refused now, or "". */
  constructor(removed, whyNoImages, files = []) {
    this.removed = removed;
    this.whyNoImages = whyNoImages;
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
        const shown = file.image === undefined ? h("small", {}, size(file.text)) : h("img", { src: file.image, alt: "" });
        return h("li", {}, file.name, " ", shown, cross);
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
        const read = await readFile(file);
        const refused = read.image === undefined ? "" : this.whyNoImages();
        if (refused) throw new Error(`${read.name} is not attached: ${refused}`);
        this.show([...this.files, read]);
        announce(`${read.name} is attached`);
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.showProblem(problems.join(" "));
  }

  showProblem(text) {
    this.problem.textContent = text;
    this.problem.hidden = !text;
  }

  /** Whether all may be sent: another model may have been chosen. earlier: the files of the messages before. */
  maySend(earlier = []) {
    const refused = [...earlier, ...this.files].some(({ image }) => image !== undefined) ? this.whyNoImages() : "";
    if (refused) this.showProblem(`There are images in this chat. ${refused}`);
    return !refused;
  }

  /** Returns the files, which are no longer attached. */
  take() {
    const files = this.files;
    this.showProblem("");
    this.show([]);
    return files;
  }
}
