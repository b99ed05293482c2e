// Reads server-sent events from a fetch response. EventSource cannot send a key in a header.

/** Yields the data of each event. The server says in comments what it waits for: they go to `noted`. */
export async function* events(response, noted = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ")) yield line.slice(6);
        else if (line.startsWith(": ")) noted(line.slice(2));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
