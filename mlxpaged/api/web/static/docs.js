// The OpenAPI document of this server: its endpoints, their fields, and forms that send requests.
import { get, inPath, request } from "./lib/api.js";
import { h, labelled } from "./lib/dom.js";
import { startTheme } from "./lib/theme.js";

const MAX_SHOWN = 100_000; // characters of an answer

startTheme(document.getElementById("theme-button"));

function nameOf(reference) {
  return reference.split("/").at(-1);
}

/** What a value is, in a few words. The name of an object is a link to its fields. */
function typeOf(schema) {
  if (schema.$ref) return [h("a", { href: `#${nameOf(schema.$ref)}` }, nameOf(schema.$ref))];
  const choices = schema.anyOf ?? schema.oneOf ?? (schema.enum ?? []).map((value) => ({ const: value }));
  if (choices.length) return choices.flatMap((choice, i) => [i ? " or " : "", ...typeOf(choice)]);
  if ("const" in schema) return [h("code", {}, JSON.stringify(schema.const))];
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items ?? {})];
  return [schema.type ?? "anything"];
}

/** rows: [name, schema, whether it is required]. */
function fields(title, rows) {
  const cells = ([name, schema, required]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, h("code", {}, name)),
      h("td", {}, typeOf(schema)),
      h("td", {}, required && "required"),
      h("td", {}, schema.description),
    );
  return rows.length > 0 && h("table", {}, h("caption", {}, title), h("tbody", {}, rows.map(cells)));
}

function fieldsOf(title, schema) {
  const required = schema.required ?? [];
  return fields(
    title,
    Object.entries(schema.properties ?? {}).map(([name, each]) => [name, each, required.includes(name)]),
  );
}

/** The required fields, for the user to fill in. */
function outline(schema) {
  const blank = { array: [], string: "", object: {} };
  const entries = (schema.required ?? []).map((name) => [name, blank[schema.properties[name].type] ?? null]);
  return JSON.stringify(Object.fromEntries(entries), null, 2);
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // events, lines of JSON, metrics
  }
}

function form(method, path, parameters, body) {
  const inputs = parameters.filter((each) => each.in !== "header").map((each) => ({ ...each, input: h("input", {}) }));
  const text = body && h("textarea", { rows: 8, spellcheck: "false", class: "code" }, outline(body));
  const answer = h("pre", { "aria-live": "polite", tabindex: 0, hidden: true });

  async function send(event) {
    event.preventDefault();
    const given = Object.fromEntries(inputs.map((each) => [each.name, each.input.value]));
    const query = inputs.filter((each) => each.in === "query" && each.input.value !== "");
    const address = path.slice(1).replace(/{(\w+)}/g, (_, name) => inPath(given[name]));
    const search = new URLSearchParams(query.map((each) => [each.name, each.input.value]));
    answer.hidden = false;
    answer.textContent = "…";
    try {
      const sent = { method: method.toUpperCase(), body: text ? JSON.parse(text.value) : null };
      const response = await request(query.length ? `${address}?${search}` : address, sent);
      answer.textContent = `${response.status}\n${indented(await response.text()).slice(0, MAX_SHOWN)}`;
    } catch (error) {
      answer.textContent = `${error.status || ""} ${error.message}`.trim();
    }
  }

  const labels = inputs.map((each) => labelled(each.name, each.input));
  return h("form", { onsubmit: send }, labels, text && labelled("Body", text), h("button", {}, "Send"), answer);
}

function endpoint(path, method, described, schemas) {
  const content = Object.entries(described.requestBody?.content ?? {})[0];
  const body = content && schemas[nameOf(content[1].schema.$ref)];
  const parameters = described.parameters ?? [];
  const isJson = !content || content[0] === "application/json"; // a file is not sent from here
  return h(
    "details",
    { id: `${method}${path.replace(/\W+/g, "_")}` },
    h("summary", {}, h("code", {}, `${method.toUpperCase()} ${path}`), ` ${described.summary}`),
    fields(
      "Parameters",
      parameters.map((each) => [each.name, each.schema, each.required]),
    ),
    body && fieldsOf(`Body (${content[0]})`, body),
    isJson && form(method, path, parameters, body),
  );
}

function show({ info, paths, components }) {
  const endpoints = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, described]) => endpoint(path, method, described, components.schemas)),
  );
  const objects = Object.entries(components.schemas).map(([name, schema]) =>
    h("details", { id: name }, h("summary", {}, h("code", {}, name)), fieldsOf("Fields", schema) || typeOf(schema)),
  );
  return [h("h1", {}, `${info.title} ${info.version}`), ...endpoints, h("h2", {}, "Objects"), ...objects];
}

function openLinked() {
  const linked = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (linked?.tagName === "DETAILS") linked.open = true;
  linked?.scrollIntoView();
}

const main = document.getElementById("main");
try {
  main.append(...show(await get("openapi.json")));
  addEventListener("hashchange", openLinked);
  openLinked();
} catch (error) {
  main.prepend(h("p", { class: "notice error", role: "alert" }, error.message));
}
