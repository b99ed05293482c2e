// What was used: bytes written to a disk, and tokens of each API key.
import { h } from "../lib/dom.js";
import { bytes, count } from "../lib/format.js";

export class Usage {
  constructor() {
    this.writes = new Card("Written to the disk", ["What", "Today (UTC)", "Since the start"]);
    this.keys = new Card("API keys", ["Key", "Requests", "Prompt tokens", "Of them cached", "Output tokens", "This month"]);
    this.elements = [this.writes.element, this.keys.element];
  }

  /** keys: none if the server has no API keys. */
  show({ models, keys = [] }) {
    this.writes.show(writesOf(models));
    this.keys.show(
      keys.map((key) => [
        key.name,
        ...[key.requests, key.prompt_tokens, key.cached_tokens, key.output_tokens, key.month_tokens].map(count),
      ]),
    );
  }
}

/** Prefixes, by their directories, which models may share, and the swap file of each model. */
function writesOf(models) {
  const tiers = models.map((model) => model.prefix_cache_disk).filter((tier) => tier?.directory);
  const stores = [...new Map(tiers.map((tier) => [tier.directory, tier])).values()];
  const swaps = models.filter(({ swap }) => swap?.written_bytes);
  const row = (name, { written_today_bytes: today, written_bytes: total }) => [name, bytes(today), bytes(total)];
  return [
    ...stores.map((tier) => row(`Prefixes in ${tier.directory}`, tier)),
    ...swaps.map(({ id, swap }) => row(`Swap of ${id}`, swap)),
  ];
}

class Card {
  constructor(title, names) {
    this.body = h("tbody", {});
    const table = h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)))),
      this.body,
    );
    this.element = h(
      "section",
      { class: "card", hidden: true },
      h("h2", {}, title),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, table),
    );
  }

  show(rows) {
    const drawn = JSON.stringify(rows);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    this.element.hidden = rows.length === 0;
    this.body.replaceChildren(...rows.map((cells) => h("tr", {}, ...cells.map((cell) => h("td", {}, cell)))));
  }
}
