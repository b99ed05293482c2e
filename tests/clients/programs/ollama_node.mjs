import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2] });
const model = (await client.list()).models[0].model;
const user = (text) => [{ role: "system", content: "Be brief." }, { role: "user", content: text }];

console.log("models:", model.replace(":latest", ""));
console.log("shown models:", (await client.ps()).models[0].model.replace(":latest", ""));

console.log("chat:", (await client.chat({ model, messages: user("Hello"), options: { num_ctx: 8192 } })).message.content);
let text = "";
for await (const part of await client.chat({ model, messages: user("Hello"), stream: true })) text += part.message.content;
console.log("stream:", text);
console.log("generated chat:", (await client.generate({ model, prompt: "Hello", system: "Be brief." })).response);

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "The weather in a city.", parameters } }];
const messages = user("Weather in Rome?");
for (const stream of [false, true]) {
  let message = { role: "assistant", content: "", tool_calls: [] };
  if (stream) {
    for await (const part of await client.chat({ model, messages, tools, think: true, stream })) {
      message.content += part.message.content;
      message.tool_calls.push(...(part.message.tool_calls ?? []));
    }
  } else {
    message = (await client.chat({ model, messages, tools, think: true })).message;
  }
  const { name, arguments: given } = message.tool_calls[0].function;
  messages.push(message, { role: "tool", content: `21 degrees in ${given.city}`, tool_name: name });
  const answer = (await client.chat({ model, messages, tools })).message;
  console.log("tool:", answer.content);
  messages.push(answer, { role: "user", content: "Weather in Rome?" });
}

const format = { type: "object", properties: { city: { type: "string" }, degrees: { type: "integer" } } };
const object = (await client.chat({ model, messages: user("Describe Rome"), format })).message.content;
console.log("object:", JSON.stringify(JSON.parse(object)));
