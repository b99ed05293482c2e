#!/usr/bin/env bash
# The AI SDK sends an earlier answer of the Responses API as a reference to its id, without its text.
#
# A program that keeps the messages of a conversation itself, as it does with other APIs, still depends on the items that
# the server has stored: after a restart, or at another server, what the model said is not in the request at all. With
# `store: false` among the provider's options, the text is sent.
# Seen with ai 6.0.325 and @ai-sdk/openai 3.0.141. It needs node and npm. It fails if the behaviour changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" ai@6.0.325 @ai-sdk/openai@3.0.141 zod@4.1.8

cd "$folder"
cat >ask.mjs <<'JS'
import { createOpenAI } from "@ai-sdk/openai";
import { generateText } from "ai";

const sent = [];
const answer = (number) => ({
  id: `resp_${number}`, object: "response", created_at: 1, model: "m", status: "completed", error: null,
  incomplete_details: null,
  output: [{ type: "message", id: `msg_${number}`, role: "assistant", status: "completed",
    content: [{ type: "output_text", text: "The river is blue.", annotations: [] }] }],
  usage: { input_tokens: 1, output_tokens: 1, total_tokens: 2,
    input_tokens_details: { cached_tokens: 0 }, output_tokens_details: { reasoning_tokens: 0 } },
});
const fetch = async (url, { body }) => {
  sent.push(JSON.parse(body));
  return new Response(JSON.stringify(answer(sent.length)), { headers: { "content-type": "application/json" } });
};
const model = createOpenAI({ apiKey: "unused", fetch }).responses("m");

async function secondRequest(options) {
  sent.length = 0;
  const messages = [{ role: "user", content: "Say something." }];
  const first = await generateText({ model, messages, ...options });
  messages.push(...first.response.messages, { role: "user", content: "And now?" });
  await generateText({ model, messages, ...options });
  return sent[1].input;
}

const byDefault = await secondRequest({});
const unstored = await secondRequest({ providerOptions: { openai: { store: false } } });
console.log(JSON.stringify({ byDefault, unstored }, null, 1));
const holds = (input) => JSON.stringify(input).includes("The river is blue.");
const refers = byDefault.some((item) => item.type === "item_reference" && item.id === "msg_1");
process.exit(refers && !holds(byDefault) && holds(unstored) ? 0 : 1);
JS
node ask.mjs
