import Anthropic from "@anthropic-ai/sdk";

const { beta, messages } = new Anthropic({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
const fields = { model: "scripted", max_tokens: 200, system: "Be brief." };
const user = (content) => [{ role: "user", content }];

console.log("chat:", (await messages.create({ ...fields, messages: user("Hello") })).content[0].text);

console.log("stream:", await messages.stream({ ...fields, messages: user("Hello") }).finalText());

const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "weather", input_schema: schema }];
const first = await messages.create({ ...fields, tools, messages: user("Weather in Rome?") });
const call = first.content.find((block) => block.type === "tool_use");
const history = [
  ...user("Weather in Rome?"),
  { role: "assistant", content: first.content },
  ...user([{ type: "tool_result", tool_use_id: call.id, content: "21 degrees" }]),
];
console.log("tool:", (await messages.create({ ...fields, tools, messages: history })).content[0].text);

const weather = { ...tools[0], type: "custom", run: ({ city }) => `21 degrees in ${city}`, parse: (input) => input };
const done = await beta.messages.toolRunner({ ...fields, tools: [weather], messages: user("Weather in Rome?") });
console.log("runner tool:", done.content[0].text);

const unsupportedRequestBehavior = "continue_unthreaded"; // the package sends all messages
const thread = beta.messages.thread({ ...fields, tools: [weather], unsupportedRequestBehavior });
for (const stream of [false, true, true]) {
  thread.append(...user("Weather in Rome?"));
  const answer = await thread.toolRunner({ stream }).runUntilDone();
  console.log("thread tool:", answer.content[0].text);
}
if (thread.messages.length !== 12) throw new Error("a question, a call, its result and an answer in each turn");

const format = { type: "object", properties: { ...schema.properties, degrees: { type: "integer" } } };
const output_config = { format: { type: "json_schema", schema: { ...format, additionalProperties: false } } };
const object = await messages.create({ ...fields, output_config, messages: user("Describe Rome") });
console.log("object:", JSON.stringify(JSON.parse(object.content[0].text)));
