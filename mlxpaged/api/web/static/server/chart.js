// A chart of the last two minutes as SVG: lines, or stacked areas.
import { h, set, svg } from "../lib/dom.js";
import { SECONDS } from "./history.js";

const WIDTH = 300;
const HEIGHT = 84;

export class Chart {
  /** series: [{name, text, format, look}]. look: its class. stacked: areas on top of each other. least: the scale's smallest upper end. */
  constructor(title, series, { stacked = false, least = 1, area = false } = {}) {
    this.title = title;
    this.series = series;
    this.stacked = stacked;
    this.least = least;
    this.filled = stacked || area;
    this.shapes = series.map(({ look }) => svg("path", { class: `${this.filled ? "area" : "line"} ${look}` }));
    this.svg = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title },
      svg("path", { class: "grid", d: `M0 ${HEIGHT - 0.5}H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 .5H${WIDTH}` }),
      ...this.shapes,
    );
    this.scale = h("span", { class: "scale", "aria-hidden": "true" });
    this.values = series.map(() => h("dd", {}, "–"));
    const legend = series.map(({ text, look }, index) =>
      h("div", {}, h("dt", {}, h("i", { class: `key ${look}` }), text), this.values[index]),
    );
    this.element = h(
      "section",
      { class: "card chart" },
      h("h3", {}, title),
      h("dl", {}, ...legend),
      h("div", { class: "plot" }, this.svg, this.scale),
    );
  }

  show(points) {
    const last = points.at(-1);
    this.series.forEach(({ name, format }, index) => {
      const text = last[name] === null ? "–" : format(last[name]);
      if (this.values[index].textContent !== text) this.values[index].textContent = text;
    });
    const tops = points.map((point) =>
      this.stacked
        ? this.series.reduce((sum, { name }) => sum + (point[name] ?? 0), 0)
        : Math.max(0, ...this.series.map(({ name }) => point[name] ?? 0)),
    );
    const top = niceTop(Math.max(this.least, ...tops));
    this.scale.textContent = this.series[0].format(top);
    const x = (point) => (WIDTH * (1 - (last.time - point.time) / SECONDS)).toFixed(1);
    const y = (value) => (HEIGHT * (1 - value / top)).toFixed(1);
    const below = points.map(() => 0);
    this.series.forEach(({ name }, index) => {
      const path = this.filled ? areaPath(points, name, below, this.stacked, x, y) : linePath(points, name, x, y);
      set(this.shapes[index], { d: path });
    });
  }
}

function linePath(points, name, x, y) {
  let path = "";
  let pen = "M";
  for (const point of points) {
    if (point[name] === null) {
      pen = "M";
      continue;
    }
    path += `${pen}${x(point)} ${y(point[name])}`;
    pen = "L";
  }
  return path;
}

function areaPath(points, name, below, stacked, x, y) {
  const lower = [];
  const upper = [];
  points.forEach((point, index) => {
    lower.push(`${x(point)} ${y(below[index])}`);
    const value = below[index] + (point[name] ?? 0);
    upper.push(`${x(point)} ${y(value)}`);
    if (stacked) below[index] = value;
  });
  return `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
}

/** The next of 1, 2, 5, 10, 20... */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
