// The last requests that the server refused.
import { h } from "../lib/dom.js";

export class Refusals {
  constructor() {
    this.body = h("tbody", {});
    this.empty = h("p", { class: "soft" }, "None so far.");
    this.table = h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Last refusals", hidden: true },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ...["Time", "Status", "Request", "Code", "Reason"].map((text) => h("th", { scope: "col" }, text)))),
        this.body,
      ),
    );
    this.element = h("section", { class: "card" }, h("h2", {}, "Last refusals"), this.empty, this.table);
    this.latest = null;
  }

  show(refusals) {
    const latest = refusals.length ? `${refusals[0].time} ${refusals[0].request_id}` : null;
    if (latest === this.latest) return;
    this.latest = latest;
    this.empty.hidden = refusals.length > 0;
    this.table.hidden = refusals.length === 0;
    this.body.replaceChildren(
      ...refusals.map((each) =>
        h(
          "tr",
          {},
          h("td", {}, new Date(each.time * 1000).toLocaleTimeString()),
          h("td", {}, `${each.status}`),
          h("td", {}, h("code", {}, `${each.method} ${each.path}`)),
          h("td", {}, h("code", {}, each.code)),
          h("td", {}, each.param ? `${each.param}: ${each.reason}` : each.reason),
        ),
      ),
    );
  }
}
