// Requests to the server that sent this page.
import { askForKey, key } from "./key.js";

export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Sends a request. Asks for a key if the server wants another one. Returns the response; throws ApiError. */
export async function request(path, { method = "GET", body = null, signal = null, headers = {} } = {}) {
  for (;;) {
    const sent = { ...headers };
    if (key() !== null) sent.Authorization = `Bearer ${key()}`;
    if (body !== null) sent["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method,
        headers: sent,
        signal,
        cache: "no-store",
        credentials: "omit",
        body: body === null ? null : JSON.stringify(body),
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError(0, "The server does not answer.");
    }
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status !== 401 || !(await askForKey(error.message))) throw error;
  }
}

async function errorOf(response) {
  let found = {};
  try {
    found = (await response.json()).error ?? {};
  } catch {
    // not one of the server's own errors: a proxy's, for example
  }
  if (typeof found === "string") found = { message: found }; // as Ollama's API has it
  return new ApiError(response.status, found.message ?? `The server answered ${response.status}.`, found.code);
}

export async function get(path) {
  return (await request(path)).json();
}

export async function post(path) {
  return (await request(path, { method: "POST" })).json();
}

export async function remove(path) {
  return (await request(path, { method: "DELETE" })).json();
}

/** The id of a model or a request in a path. Names of models have slashes, which stay. */
export function inPath(id) {
  return id.split("/").map(encodeURIComponent).join("/");
}
