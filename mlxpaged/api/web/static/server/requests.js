// The requests in the order in which they are served, each with its timeline.
import { ApiError, inPath, remove } from "../lib/api.js";
import { announce, button, h } from "../lib/dom.js";
import { count, plural, seconds } from "../lib/format.js";

const PHASES = ["queued", "prefill", "decode", "preempted", "unseen"];
const LEAST_SPAN = 10; // seconds that the full width of a bar stands for, at least

export class Requests {
  constructor() {
    this.rows = new Map(); // by request id
    this.list = h("ul", { class: "requests" });
    this.empty = h("p", { class: "soft" }, "No request is running or waiting.");
    this.more = h("p", { class: "soft", hidden: true });
    this.ended = h("ul", { class: "requests" });
    this.past = h("details", { hidden: true }, h("summary", {}, "Ended just now"), this.ended);
    this.element = h(
      "section",
      { class: "card" },
      h("h2", {}, "Requests"),
      h("ul", { class: "legend" }, ...PHASES.map((phase) => h("li", {}, h("i", { class: `key ${phase}` }), phase))),
      this.empty,
      this.list,
      this.more,
      this.past,
    );
  }

  show(models) {
    const several = models.length > 1;
    const requests = models.flatMap((model) => (model.requests ?? []).map((each) => ({ ...each, model: model.id })));
    const ended = models.flatMap((model) => model.ended ?? []);
    const span = Math.max(LEAST_SPAN, ...[...requests, ...ended].map((each) => each.age_seconds));
    const ids = new Set(requests.map((each) => each.request_id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      const focused = row.element.contains(document.activeElement);
      row.element.remove();
      this.rows.delete(id);
      if (focused) this.list.querySelector("button")?.focus();
    }
    requests.forEach((request, index) => {
      let row = this.rows.get(request.request_id);
      if (row === undefined) {
        row = new Row(request, several);
        this.rows.set(request.request_id, row);
      }
      row.show(request, span);
      // Moving an element takes the focus from it, so only those in the wrong place are moved.
      if (this.list.children[index] !== row.element) this.list.insertBefore(row.element, this.list.children[index] ?? null);
    });
    this.empty.hidden = requests.length > 0;
    const total = models.reduce((sum, model) => sum + (model.running ?? 0) + (model.waiting ?? 0), 0);
    this.more.hidden = total <= requests.length;
    this.more.textContent = `and ${plural(total - requests.length, "more request")} waiting`;
    this.past.hidden = ended.length === 0;
    if (this.past.open) this.ended.replaceChildren(...ended.map((each) => endedRow(each, span)));
  }
}

class Row {
  constructor(request, showModel) {
    const id = request.request_id;
    this.facts = h("span", { class: "facts" });
    this.bar = h("div", { class: "timeline" });
    this.progress = h("progress", { "aria-label": `Prompt of ${id}` });
    this.badge = h("span", { class: "badge" });
    this.cancel = button("Cancel", () => this.end(id), { "aria-label": `Cancel ${id}` });
    this.element = h(
      "li",
      {},
      h("div", { class: "head" }, this.badge, h("code", {}, id), showModel && h("span", { class: "soft" }, request.model)),
      this.facts,
      this.cancel,
      this.bar,
      this.progress,
    );
  }

  show(request, span) {
    const { status, phase, priority, age_seconds: age, prompt_tokens: prompt, computed_tokens: computed } = request;
    const doing = phase ?? (status === "waiting" ? "queued" : status);
    const facts = [
      doing,
      `age ${seconds(age)}`,
      phase === "prefill" ? `${count(Math.min(computed, prompt))} of ${plural(prompt, "prompt token")}` : plural(prompt, "prompt token"),
    ];
    if (request.cached_tokens) facts.push(`${count(request.cached_tokens)} cached`);
    if (request.output_tokens) facts.push(plural(request.output_tokens, "output token"));
    if (request.blocks) facts.push(`${plural(request.blocks, "block")}${request.shared_blocks ? `, ${count(request.shared_blocks)} shared` : ""}`);
    if (request.preemptions) facts.push(`preempted ${request.preemptions}×`);
    this.facts.textContent = facts.join(" · ");
    this.badge.textContent = priority;
    this.badge.className = `badge ${priority}`;
    this.badge.title = `Effective priority ${request.effective_priority.toFixed(2)}: the lowest is served first`;
    this.progress.hidden = phase !== "prefill";
    this.progress.max = prompt;
    this.progress.value = Math.min(computed, prompt);
    drawBar(this.bar, request.segments, span);
  }

  async end(id) {
    if (this.cancel.hasAttribute("aria-disabled")) return;
    this.cancel.setAttribute("aria-disabled", "true"); // a button that is disabled would lose the focus
    try {
      await remove(`v1/requests/${inPath(id)}`);
      announce(`${id} is cancelled`);
    } catch (error) {
      this.cancel.removeAttribute("aria-disabled");
      if (!(error instanceof ApiError)) throw error;
      if (error.status !== 404) this.facts.textContent = error.message; // 404: it has just ended
    }
  }
}

function drawBar(bar, segments, span) {
  bar.replaceChildren(
    ...segments.map(([phase, length]) => {
      const part = h("span", { class: phase, title: `${phase} ${seconds(length)}` });
      part.style.width = `${(100 * length) / span}%`;
      return part;
    }),
  );
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", segments.map(([phase, length]) => `${phase} ${seconds(length)}`).join(", "));
}

function endedRow(request, span) {
  const bar = h("div", { class: "timeline" });
  drawBar(bar, request.segments, span);
  return h(
    "li",
    {},
    h("div", { class: "head" }, h("code", {}, request.request_id)),
    h("span", { class: "facts" }, `${seconds(request.age_seconds)} · ${plural(request.output_tokens, "output token")}`),
    bar,
  );
}
