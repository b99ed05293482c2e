// Conversations in the browser's database. A browser that refuses one keeps them until the tab is closed.
import { withFiles } from "./files.js";

const STORE = "conversations";

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open("mlxpaged", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Resolves when a change is on the disk. A full disk takes a value and refuses it at the end of the transaction. */
function written(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
    transaction.commit(); // now: a page that is left makes no further request of it
  });
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** An id that no other tab makes. `randomUUID` is there for https and localhost only. */
export function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).join("-");
}

export class Conversations {
  /** changed(id): another tab has saved or deleted a conversation. */
  constructor(changed = () => {}) {
    this.byId = new Map();
    this.database = opened().catch(() => null);
    this.tabs = new BroadcastChannel("mlxpaged-conversations");
    this.tabs.onmessage = ({ data: id }) => changed(id);
  }

  async store(mode) {
    const database = await this.database;
    return database && database.transaction(STORE, mode).objectStore(STORE);
  }

  async load() {
    const store = await this.store("readonly");
    for (const each of store === null ? [] : await done(store.getAll())) this.byId.set(each.id, each);
  }

  /** A conversation as it is stored now, or undefined. */
  async stored(id) {
    const store = await this.store("readonly");
    return store === null ? this.byId.get(id) : done(store.get(id));
  }

  /** The latest first. */
  list() {
    return [...this.byId.values()].sort((one, other) => other.updated - one.updated);
  }

  get(id) {
    return this.byId.get(id) ?? null;
  }

  add(model, settings) {
    const now = Date.now();
    const conversation = {
      id: newId(),
      title: "New chat",
      created: now,
      updated: now,
      model,
      settings,
      messages: [],
    };
    this.byId.set(conversation.id, conversation);
    return conversation;
  }

  save(conversation) {
    conversation.updated = Date.now();
    return this.write(conversation);
  }

  /** Adds one that comes from a file. */
  put(conversation) {
    this.byId.set(conversation.id, conversation);
    return this.write(conversation);
  }

  async write(conversation) {
    const store = await this.store("readwrite");
    if (store === null) return;
    store.put(conversation);
    await written(store.transaction);
    this.tabs.postMessage(conversation.id);
  }

  async remove(id) {
    this.byId.delete(id);
    const store = await this.store("readwrite");
    if (store === null) return;
    store.delete(id);
    await written(store.transaction);
    this.tabs.postMessage(id);
  }
}

/** What is stored: without what only counts while an answer is streamed. */
export function asStored(conversation) {
  return { ...conversation, messages: conversation.messages.map(storedMessage) };
}

function storedMessage({ running, progress, comment, versions, ...rest }) {
  if (!versions) return rest;
  const tails = versions.tails.map((tail) => tail && tail.map(storedMessage));
  return { ...rest, versions: { ...versions, tails } };
}

/** The messages as the API takes them: those of the shown versions. continues: the answer goes on with the last one,
 * whose thought is part of the prompt. */
export function asRequest(conversation, { continues = false } = {}) {
  const last = continues ? conversation.messages.at(-1) : null;
  const system = conversation.settings.system.trim();
  const messages = conversation.messages
    .filter((each) => !each.error || each.content)
    .map(({ role, content, files, toolCalls, toolCallId }, index, { length }) => ({
      role,
      content: withFiles(content, files),
      ...(last?.reasoning && index === length - 1 ? { reasoning_content: last.reasoning } : {}),
      ...(toolCalls?.length ? { tool_calls: toolCalls } : {}),
      ...(toolCallId ? { tool_call_id: toolCallId } : {}),
    }));
  return [...(system ? [{ role: "system", content: system }] : []), ...messages];
}
