import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({ name: "local", baseURL: `${process.argv[2]}/v1`, supportsStructuredOutputs: true });
const fields = { model: provider("scripted"), maxRetries: 0 };

console.log("chat:", (await generateText({ ...fields, prompt: "Hello" })).text);

console.log("stream:", await streamText({ ...fields, prompt: "Hello" }).text);

const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => "21 degrees",
});
const asked = { ...fields, prompt: "Weather in Rome?", tools: { weather }, stopWhen: stepCountIs(3) };
console.log("tool:", (await generateText(asked)).text);
console.log("streamed tool:", await (await streamText(asked).steps).at(-1).text);

const output = Output.object({ schema: z.object({ city: z.string(), degrees: z.number() }) });
console.log("object:", JSON.stringify((await generateText({ ...fields, prompt: "Describe Rome", output })).output));
