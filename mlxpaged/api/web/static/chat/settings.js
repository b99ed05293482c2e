// What a conversation asks for: system prompt, tools and sampling parameters.
import { h, labelled } from "../lib/dom.js";
import { ask } from "../lib/dialog.js";
import { device } from "../lib/storage.js";

const LAST = "mlxpaged-settings";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 10, step: 0.01 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.05 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.05 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { min: 0, step: 1 }],
];
const THINKING = [
  ["", "as the model does"],
  ["none", "off"],
  ["low", "up to 1,024 tokens"],
  ["medium", "up to 4,096 tokens"],
  ["high", "up to 16,384 tokens"],
  ["max", "no limit"],
];

export function noSettings() {
  return { system: "", stop: "", schema: "", tools: "", thinking: "", numbers: {} };
}

/** Those of the last chat whose settings were changed. */
export function lastSettings() {
  try {
    return { ...noSettings(), ...JSON.parse(device.getItem(LAST)) };
  } catch {
    return noSettings();
  }
}

export function keepSettings(settings) {
  device.setItem(LAST, JSON.stringify(settings));
}

/** The fields of the request's body. */
export function fields(settings) {
  const { stop, schema } = { ...noSettings(), ...settings }; // a chat that was stored earlier has fewer
  const stops = stop.split("\n").filter(Boolean).map((each) => each.replaceAll("\\n", "\n"));
  return {
    ...settings.numbers,
    ...(stops.length ? { stop: stops } : {}),
    ...(schema.trim() ? { response_format: responseFormat(JSON.parse(schema)) } : {}),
    ...(settings.thinking ? { reasoning_effort: settings.thinking } : {}),
    ...(settings.tools.trim() ? { tools: JSON.parse(settings.tools) } : {}),
  };
}

function responseFormat(schema) {
  return { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
}

/** Lets the user change the settings. Returns the new ones, or null. */
export async function editSettings(settings, model) {
  const system = h("textarea", { rows: 4, name: "system" });
  system.value = settings.system;
  const stop = h("textarea", { rows: 2, name: "stop", spellcheck: "false", class: "code" });
  stop.value = settings.stop ?? "";
  const schema = jsonField("schema", settings.schema ?? "", isObject, "A JSON schema is an object.");
  const tools = jsonField("tools", settings.tools, Array.isArray, "Tools are a JSON array.");
  const defaults = model?.sampling_defaults ?? {};
  const inputs = NUMBERS.map(([name, text, limits]) => {
    const placeholder = name in defaults ? `${defaults[name]}` : "default";
    const input = h("input", { type: "number", name, inputmode: "decimal", placeholder, ...limits });
    input.value = settings.numbers[name] ?? "";
    return [name, text, input];
  });
  const thinking = h("select", { name: "thinking" }, ...THINKING.map(([value, text]) => h("option", { value }, text)));
  thinking.value = settings.thinking;
  const thinks = model?.capabilities?.thinking ?? false;
  const content = h(
    "div",
    { class: "settings" },
    labelled("System prompt", system),
    h("div", { class: "numbers" }, ...inputs.map(([, text, input]) => labelled(text, input)), thinks && labelled("Thinking", thinking)),
    labelled("Stop", stop, "Texts that end the answer, one on each line. \\n is the end of a line."),
    labelled("JSON schema", schema, "The answer is JSON that fits it."),
    labelled("Tools", tools, "A JSON array in OpenAI's format. You give the results."),
  );
  return ask("Settings of this chat", content, {
    accept: "Save",
    read: () => ({
      system: system.value,
      stop: stop.value,
      schema: schema.value,
      tools: tools.value,
      thinking: thinks ? thinking.value : "",
      numbers: Object.fromEntries(
        inputs.filter(([, , input]) => input.value !== "").map(([name, , input]) => [name, input.valueAsNumber]),
      ),
    }),
  });
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** A field that takes JSON of a kind, or nothing. */
function jsonField(name, value, isRight, problem) {
  const field = h("textarea", { rows: 3, name, spellcheck: "false", class: "code" });
  field.value = value;
  field.addEventListener("input", () => field.setCustomValidity(problemOf(field.value, isRight, problem)));
  return field;
}

function problemOf(text, isRight, problem) {
  if (!text.trim()) return "";
  try {
    return isRight(JSON.parse(text)) ? "" : problem;
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}
