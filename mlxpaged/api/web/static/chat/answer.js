// One answer: asks the server for it, and collects what comes.
import { ApiError, request } from "../lib/api.js";
import { events } from "../lib/events.js";

/** Fills `message` ({content, reasoning, toolCalls, stats, finish}) and calls `changed` after each event. Returns when
 * the answer is complete. Throws ApiError, or AbortError if `signal` stops it. */
export async function receive(body, message, { signal, changed }) {
  const started = performance.now();
  let first = null;
  let last = started;
  let usage = null;
  const measure = () => {
    const seconds = first === null ? 0 : (last - first) / 1000;
    const tokens = usage?.completion_tokens ?? null;
    message.stats = {
      ttft: first === null ? null : (first - started) / 1000,
      tokens,
      perSecond: tokens >= 8 && seconds > 0.02 ? (tokens - 1) / seconds : null,
      promptTokens: usage?.prompt_tokens ?? null,
      cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    };
  };
  const response = await request("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "X-Mlxpaged-Progress": "1" },
    body: { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } },
  });
  const noted = (text) => {
    message.comment = text;
    changed();
  };
  for await (const data of events(response, noted)) {
    message.comment = null;
    if (data === "[DONE]") {
      message.progress = null;
      measure();
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error.message, chunk.error.code);
    message.progress = chunk.prompt_progress ?? null;
    usage = chunk.usage ?? usage;
    for (const { delta, finish_reason: finish } of chunk.choices) {
      if (delta.content || delta.reasoning_content || delta.tool_calls) {
        last = performance.now();
        first ??= last;
      }
      message.content += delta.content ?? "";
      message.reasoning += delta.reasoning_content ?? "";
      for (const call of delta.tool_calls ?? []) addCall(message, call);
      if (finish) message.finish = finish;
    }
    measure();
    changed();
  }
  throw new ApiError(0, "The answer ended early: the server closed the connection.");
}

function addCall(message, { index, id, function: called = {} }) {
  message.toolCalls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
  const call = message.toolCalls[index];
  if (id) call.id = id;
  call.function.name += called.name ?? "";
  call.function.arguments += called.arguments ?? "";
}
