import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.argv[2];
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "unused" });
const models = {
  "": createOpenAICompatible({ name: "local", baseURL, supportsStructuredOutputs: true })("scripted"),
  "openai ": openai.chat("scripted"),
  "responses ": openai.responses("scripted"),
  "anthropic ": createAnthropic({ baseURL, apiKey: "unused" })("scripted"),
};
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => "21 degrees",
});
const output = Output.object({ schema: z.object({ city: z.string(), degrees: z.number() }) });

for (const [prefix, model] of Object.entries(models)) {
  const fields = { model, maxRetries: 0 };
  console.log(`${prefix}chat:`, (await generateText({ ...fields, prompt: "Hello" })).text);
  console.log(`${prefix}stream:`, await streamText({ ...fields, prompt: "Hello" }).text);

  const messages = [];
  for (const streams of [false, true, true]) {
    messages.push({ role: "user", content: "Weather in Rome?" });
    const asked = { ...fields, messages, tools: { weather }, stopWhen: stepCountIs(3) };
    const result = streams ? streamText(asked) : await generateText(asked);
    console.log(`${prefix}${streams ? "streamed " : ""}tool:`, (await result.steps).at(-1).text.trim());
    messages.push(...(await result.response).messages);
  }
  // Else the package asks for a tool of its own of models that it does not know.
  const providerOptions = { anthropic: { structuredOutputMode: "outputFormat" } };
  const described = await generateText({ ...fields, prompt: "Describe Rome", output, providerOptions });
  console.log(`${prefix}object:`, JSON.stringify(described.output));
}
