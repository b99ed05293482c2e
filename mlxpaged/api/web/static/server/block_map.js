// The pool of KV blocks, a cell for each block or each few blocks. Shared blocks stand out.
import { h } from "../lib/dom.js";
import { count, plural } from "../lib/format.js";

const KINDS = ["free", "cached", "one request", "2 or 3 share it", "4 or more"];

/** state: 0 free, 1 cached, else 1 + the number of references. */
function kindOf(state) {
  if (state <= 2) return state;
  return state <= 4 ? 3 : 4;
}

export class BlockMap {
  constructor() {
    this.canvas = h("canvas", { role: "img" });
    this.text = h("p", { class: "soft" });
    this.keys = KINDS.map((_, index) => h("i", { class: `key cell-${index}` }));
    const legend = h("ul", { class: "legend" }, ...KINDS.map((text, index) => h("li", {}, this.keys[index], text)));
    this.element = h(
      "section",
      { class: "card map" },
      h("h2", {}, "KV blocks"),
      this.text,
      h("div", { class: "canvas" }, this.canvas),
      legend,
    );
    this.cells = null;
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    document.addEventListener("theme-changed", () => this.draw());
  }

  show(model) {
    const { blocks, map } = model;
    this.cells = Uint8Array.from(atob(map.cells), (char) => char.charCodeAt(0));
    const shared = this.cells.reduce((sum, state) => sum + (state > 2), 0);
    const each = map.blocks_per_cell > 1 ? ` A cell is ${map.blocks_per_cell} blocks.` : "";
    const more = blocks.max_total > blocks.total ? ` The pool can grow to ${count(blocks.max_total)}.` : "";
    this.text.textContent =
      `${plural(blocks.total, "block")}: ${count(blocks.used)} used, ${count(blocks.cached)} cached, ` +
      `${count(blocks.free)} free; ${plural(shared, "cell")} shared.${more}${each}`;
    this.draw();
  }

  draw() {
    if (this.cells === null || !this.canvas.isConnected) return;
    const width = this.canvas.parentElement.clientWidth;
    const ratio = devicePixelRatio;
    const number = this.cells.length;
    // The largest cells with which the map is at most 200 pixels high.
    let size = 14;
    while (size > 3 && Math.ceil(number / Math.floor(width / size)) * size > 200) size -= 1;
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(number / columns);
    this.canvas.width = Math.round(columns * size * ratio);
    this.canvas.height = Math.round(rows * size * ratio);
    this.canvas.style.width = `${columns * size}px`;
    this.canvas.style.height = `${rows * size}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const colours = this.keys.map((each) => getComputedStyle(each).backgroundColor);
    const gap = size > 4 ? 1 : 0.5;
    for (const [kind, colour] of colours.entries()) {
      context.fillStyle = colour;
      for (let index = 0; index < number; index++) {
        if (kindOf(this.cells[index]) !== kind) continue;
        const x = (index % columns) * size;
        const y = Math.floor(index / columns) * size;
        context.fillRect(x, y, size - gap, size - gap);
      }
    }
    this.canvas.setAttribute("aria-label", `Map of the blocks. ${this.text.textContent}`);
  }
}
