// What a conversation asks for: system prompt, tools and sampling parameters.
import { h, labelled } from "../lib/dom.js";
import { ask } from "../lib/dialog.js";

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
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
  return { system: "", tools: "", thinking: "", numbers: {} };
}

/** The fields of the request's body. */
export function fields(settings) {
  return {
    ...settings.numbers,
    ...(settings.thinking ? { reasoning_effort: settings.thinking } : {}),
    ...(settings.tools.trim() ? { tools: JSON.parse(settings.tools) } : {}),
  };
}

/** Lets the user change the settings. Returns the new ones, or null. */
export async function editSettings(settings, model) {
  const system = h("textarea", { rows: 4, name: "system" });
  system.value = settings.system;
  const tools = h("textarea", { rows: 3, name: "tools", spellcheck: "false", class: "code" });
  tools.value = settings.tools;
  tools.addEventListener("input", () => tools.setCustomValidity(problemOf(tools.value)));
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
    labelled("Tools", tools, "A JSON array in OpenAI's format. You give the results."),
  );
  return ask("Settings of this chat", content, {
    accept: "Save",
    read: () => ({
      system: system.value,
      tools: tools.value,
      thinking: thinks ? thinking.value : "",
      numbers: Object.fromEntries(
        inputs.filter(([, , input]) => input.value !== "").map(([name, , input]) => [name, input.valueAsNumber]),
      ),
    }),
  });
}

function problemOf(text) {
  if (!text.trim()) return "";
  try {
    return Array.isArray(JSON.parse(text)) ? "" : "Tools are a JSON array.";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}
