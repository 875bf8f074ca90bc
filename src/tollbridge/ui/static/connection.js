// The router's events by fetch: EventSource cannot send a header, and the key belongs in none of the addresses.

import { byId } from "./dom.js";

const KEY = "tollbridge-key";
const SILENCE_MS = 6000; // then the connection is given up: the router speaks twice a second
const PAUSES_MS = [300, 600, 1200, 2500];

export function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}`, ...more } : more;
}

/** Ask the person for a key; resolves once one was given. */
function askKey() {
  const dialog = byId("ask");
  if (!dialog.open) dialog.showModal();
  return new Promise((given) => {
    byId("ask-form").onsubmit = () => {
      sessionStorage.setItem(KEY, byId("key").value.trim());
      byId("key").value = "";
      given();
    };
    dialog.oncancel = (event) => event.preventDefault(); // there is nothing to see without one
  });
}

/** Yield {event, data} of each server-sent event of `response`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const each of whole) {
      const lines = each.split("\n");
      const event = lines.find((line) => line.startsWith("event: "))?.slice(7) ?? "message";
      yield { event, data: lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n") };
    }
  }
}

export class Connection {
  /** `told(event, value)` for each event, `state("live" | "lost" | "wait")` as it changes. */
  constructor(told, state) {
    this.told = told;
    this.state = state;
    this.stop = null;
    this.failures = 0;
    document.addEventListener("visibilitychange", () => this.seen());
  }

  async run() {
    for (;;) {
      if (document.hidden) await new Promise((back) => { this.wake = back; });
      const wrongKey = await this.once();
      if (wrongKey) await askKey();
      else await new Promise((over) => setTimeout(over, PAUSES_MS[Math.min(this.failures++, PAUSES_MS.length - 1)]));
    }
  }

  /** Follow one connection to its end; returns whether the key was refused. */
  async once() {
    this.stop = new AbortController();
    const alarm = () => setTimeout(() => this.stop.abort(), SILENCE_MS);
    let timer = alarm();
    try {
      const response = await fetch("events", { headers: headers(), signal: this.stop.signal, cache: "no-store" });
      if (response.status === 401) return true;
      if (!response.ok) throw new Error(String(response.status));
      for await (const { event, data } of events(response)) {
        clearTimeout(timer);
        timer = alarm();
        this.failures = 0;
        this.state("live");
        this.tell(event, data);
      }
    } catch { // it ended, was silent or is not there: all the same to who looks
    } finally {
      clearTimeout(timer);
    }
    this.state(document.hidden ? "wait" : "lost");
    return false;
  }

  /** What cannot be drawn is no reason to let go of the router. */
  tell(event, data) {
    try {
      this.told(event, JSON.parse(data));
    } catch (error) {
      console.error(error);
    }
  }

  /** A page that nobody looks at costs the router nothing. */
  seen() {
    clearTimeout(this.leaving);
    if (document.hidden) this.leaving = setTimeout(() => this.stop?.abort(), 20000);
    else this.wake?.();
  }
}
