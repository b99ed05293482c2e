import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "unused", maxRetries: 0 });
const { completions } = client.chat;
const model = "scripted";
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const user = (text) => [{ role: "system", content: "Be brief." }, { role: "user", content: text }];

console.log("models:", (await client.models.list()).data[0].id);

console.log("chat:", (await completions.create({ model, messages: user("Hello") })).choices[0].message.content);

console.log("stream:", await completions.stream({ model, messages: user("Hello") }).finalContent());

const tools = [
  {
    type: "function",
    function: { name: "weather", parameters: schema, parse: JSON.parse, function: () => "21 degrees" },
  },
];
console.log("tool:", await completions.runTools({ model, messages: user("Weather in Rome?"), tools }).finalContent());

const described = { ...schema, properties: { ...schema.properties, degrees: { type: "integer" } } };
const response_format = { type: "json_schema", json_schema: { name: "weather", schema: described } };
const answer = await completions.parse({ model, messages: user("Describe Rome"), response_format });
console.log("object:", JSON.stringify(JSON.parse(answer.choices[0].message.content)));

console.log("responses chat:", (await client.responses.create({ model, input: "Hello" })).output_text);

console.log("responses stream:", (await client.responses.stream({ model, input: "Hello" }).finalResponse()).output_text);
