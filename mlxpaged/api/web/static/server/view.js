// The server: charts, blocks, requests, models and refusals, from one stream.
import { button, h } from "../lib/dom.js";
import { askForKey } from "../lib/key.js";
import { count, percent, rate, seconds } from "../lib/format.js";
import { BlockMap } from "./block_map.js";
import { Chart } from "./chart.js";
import { History } from "./history.js";
import { Models } from "./models.js";
import { Refusals } from "./refusals.js";
import { Requests } from "./requests.js";
import { Usage } from "./usage.js";
import { Watch } from "./watch.js";

export class ServerView {
  constructor() {
    this.history = new History();
    this.charts = [
      new Chart("Tokens per second", [{ name: "tokens", text: "now", format: rate, look: "first" }], {
        area: true,
        least: 10,
      }),
      new Chart("Time to first token", quantiles("ttft"), { least: 0.05 }),
      new Chart("Between tokens", quantiles("itl"), { least: 0.01 }),
      new Chart(
        "Requests",
        [
          { name: "running", text: "running", format: count, look: "first" },
          { name: "waiting", text: "waiting", format: count, look: "second" },
        ],
        { stacked: true, least: 4 },
      ),
      new Chart(
        "KV blocks",
        [
          { name: "used", text: "used", format: count, look: "cell-2" },
          { name: "cached", text: "cached", format: count, look: "cell-1" },
          { name: "free", text: "free", format: count, look: "cell-0" },
        ],
        { stacked: true },
      ),
      new Chart("Prefix hit rate", [{ name: "hitRate", text: "of prompt tokens", format: percent, look: "first" }], {
        area: true,
      }),
      new Chart("Swap", [{ name: "swap", text: "blocks", format: count, look: "first" }], { area: true, least: 10 }),
    ];
    this.swap = this.charts.at(-1);
    this.map = new BlockMap();
    this.requests = new Requests();
    this.models = new Models();
    this.usage = new Usage();
    this.refusals = new Refusals();
    this.problem = h("div", { class: "notice error", role: "alert", hidden: true });
    this.chosen = h("select", { "aria-label": "Model of the map", hidden: true, onchange: () => this.showMap() });
    this.facts = h("p", { class: "soft" }, "Connecting…");
    this.body = h(
      "div",
      { class: "cards", hidden: true },
      h("div", { class: "charts" }, ...this.charts.map((chart) => chart.element)),
      this.chosen,
      this.map.element,
      this.requests.element,
      this.models.element,
      ...this.usage.elements,
      this.refusals.element,
    );
    this.element = h(
      "div",
      { class: "server" },
      h("div", { class: "server-head" }, h("h1", {}, "Server"), this.facts),
      this.problem,
      this.body,
    );
    this.watch = new Watch((status) => this.show(status), (error) => this.fail(error));
    document.addEventListener("key-changed", () => this.element.isConnected && this.watch.adapt());
  }

  enter() {
    this.watch.start();
  }

  leave() {
    this.watch.stop();
  }

  show(status) {
    this.status = status;
    this.problem.hidden = true;
    this.body.hidden = false;
    this.history.add(status);
    this.facts.textContent = `up for ${seconds(status.uptime_seconds)}`;
    for (const chart of this.charts) chart.show(this.history.points);
    this.swap.element.hidden = !status.models.some((model) => model.swap?.total);
    this.showMap();
    this.requests.show(status.models);
    this.models.show(status.models);
    this.usage.show(status);
    this.refusals.show(status.refusals);
  }

  /** The map is that of one model. */
  showMap() {
    const models = this.status.models.filter((model) => model.map);
    const ids = models.map((model) => model.id);
    if (ids.join() !== this.ids) {
      this.ids = ids.join();
      const before = this.chosen.value;
      this.chosen.replaceChildren(...ids.map((id) => h("option", { value: id }, id)));
      if (ids.includes(before)) this.chosen.value = before;
    }
    this.chosen.hidden = ids.length < 2;
    this.map.element.hidden = ids.length === 0;
    const model = models.find((each) => each.id === this.chosen.value) ?? models[0];
    if (model !== undefined) this.map.show(model);
  }

  fail(error) {
    const another = async () => {
      if (await askForKey("The server's status needs an admin key.")) this.watch.adapt();
    };
    this.problem.replaceChildren(
      `${error.message} `,
      ...(error.status === 401 || error.status === 403 ? [button("Use another key", another)] : ["Trying again…"]),
    );
    this.problem.hidden = false;
    this.facts.textContent = "not connected";
  }
}

function quantiles(name) {
  return [
    { name: `${name}50`, text: "p50", format: seconds, look: "first" },
    { name: `${name}99`, text: "p99", format: seconds, look: "second" },
  ];
}
