// Conversations as files of JSON: what is exported, and what is taken from such a file.
import { tell } from "../lib/dialog.js";
import { announce, h } from "../lib/dom.js";
import { count, plural } from "../lib/format.js";
import { newId } from "./conversations.js";
import { noSettings } from "./settings.js";

const ROLES = ["user", "assistant", "tool"];

/** Saves a conversation, or a list of them, as a file. */
export function save(content, name) {
  const blob = new Blob([JSON.stringify(content, null, 2)], { type: "application/json" });
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: `${name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "chat"}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Adds the conversations of a file, and says how many. One that is here already stays as it is. */
export async function importFile(file, conversations) {
  try {
    const found = await readConversations(file);
    const added = found.filter(({ id }) => conversations.get(id) === null);
    for (const each of added) await conversations.put(each);
    const before = found.length - added.length;
    announce(`${plural(added.length, "chat")} imported${before ? `, ${count(before)} here already` : ""}`);
  } catch (error) {
    tell("Nothing is imported", h("p", {}, error.message));
  }
}

/** The conversations of a file. Throws an Error that says what is wrong with it. */
async function readConversations(file) {
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not JSON.`);
  }
  try {
    return [found].flat().map(conversationOf);
  } catch {
    throw new Error(`${file.name} is not a chat, or a list of chats, that this page has exported.`);
  }
}

// What is wrong throws an error. The file may come from anyone, so that each field has the type that the page expects.
function conversationOf({ id, title, named, created, updated, model, settings, messages }) {
  const now = Date.now();
  return {
    id: /^[\w-]{1,64}$/.test(id) ? id : newId(),
    title: text(title).slice(0, 200),
    ...(named === true && { named }),
    created: Number(created) || now,
    updated: Number(updated) || now,
    model: text(model ?? ""),
    settings: settingsOf(settings ?? {}),
    messages: messagesOf(messages),
  };
}

function text(value) {
  if (typeof value !== "string") throw new TypeError("not a text");
  return value;
}

function settingsOf({ numbers, ...texts }) {
  const found = noSettings();
  for (const name of Object.keys(found)) {
    if (name !== "numbers" && name in texts) found[name] = text(texts[name]);
  }
  for (const [name, value] of Object.entries(numbers ?? {})) if (Number.isFinite(value)) found.numbers[name] = value;
  for (const name of ["tools", "schema"]) if (found[name].trim()) JSON.parse(found[name]);
  return found;
}

function messagesOf(messages) {
  if (messages.length === 0) throw new TypeError("no messages");
  return messages.map(messageOf);
}

function messageOf({ role, id, content, reasoning, toolCalls, toolCallId, files, model, stats, ...rest }) {
  const { finish, stopped, error, versions } = rest;
  if (!ROLES.includes(role)) throw new TypeError("no such role");
  return {
    role,
    content: text(content),
    ...(role === "assistant" && {
      id: text(id ?? newId()),
      reasoning: text(reasoning ?? ""),
      toolCalls: (toolCalls ?? []).map(callOf),
      model: text(model ?? ""),
      ...(stats && { stats: statsOf(stats) }),
      ...(finish && { finish: text(finish) }),
      ...(stopped === true && { stopped }),
      ...(error && { error: text(error) }),
    }),
    ...(toolCallId && { toolCallId: text(toolCallId) }),
    ...(files && { files: files.map(fileOf) }),
    ...(versions && { versions: versionsOf(versions) }),
  };
}

function statsOf(stats) {
  const names = ["ttft", "tokens", "perSecond", "promptTokens", "cachedTokens"];
  return Object.fromEntries(names.map((name) => [name, Number.isFinite(stats[name]) ? stats[name] : null]));
}

function callOf({ id, function: { name, arguments: given } }) {
  return { id: text(id), type: "function", function: { name: text(name), arguments: text(given) } };
}

function fileOf({ name, text: content, image }) {
  if (image === undefined) return { name: text(name), text: text(content) };
  if (!/^data:image\/[a-z]+;base64,/.test(image)) throw new TypeError("not an image");
  return { name: text(name), image };
}

function versionsOf({ shown, tails }) {
  if (tails[shown] !== null || tails.filter((tail) => tail === null).length !== 1) throw new TypeError("not versions");
  return { shown, tails: tails.map((tail) => tail && messagesOf(tail)) };
}
