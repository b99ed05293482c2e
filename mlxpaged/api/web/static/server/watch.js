// The stream of the server's status. It is open only while the page is visible: a server without watchers computes nothing.
import { request } from "../lib/api.js";
import { events } from "../lib/events.js";

const RETRY_SECONDS = 2;

export class Watch {
  /** shown(status): twice a second. failed(error): the stream is not there; it is tried again soon. */
  constructor(shown, failed) {
    this.shown = shown;
    this.failed = failed;
    this.wanted = false;
    this.control = null;
    document.addEventListener("visibilitychange", () => this.adapt());
  }

  start() {
    this.wanted = true;
    this.adapt();
  }

  stop() {
    this.wanted = false;
    this.adapt();
  }

  adapt() {
    const wanted = this.wanted && !document.hidden;
    if (wanted && this.control === null) this.run();
    if (!wanted) this.control?.abort();
  }

  async run() {
    const control = (this.control = new AbortController());
    let refused = false;
    try {
      const response = await request("v1/status/stream", { signal: control.signal });
      for await (const data of events(response)) this.shown(JSON.parse(data));
      if (!control.signal.aborted) throw new Error("The server closed the stream.");
    } catch (error) {
      if (!control.signal.aborted) {
        this.failed(error);
        refused = error.status === 401 || error.status === 403; // another key may help, time does not
        if (!refused) await new Promise((resolve) => setTimeout(resolve, RETRY_SECONDS * 1000));
      }
    }
    this.control = null;
    if (!refused) this.adapt();
  }
}
