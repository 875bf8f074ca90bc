// One real request through the public door, and its life.

import { events, headers } from "./connection.js";
import { byId, h, mark } from "./dom.js";
import { seconds } from "./format.js";
import { timeline } from "./timeline.js";

const RECORD_TRIES = 40; // the record is complete a moment after the last byte

const EXAMPLE_MS = 4000;

export class TryIt {
  constructor() {
    this.shownAt = -EXAMPLE_MS;
    byId("try").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.running) this.send();
    });
  }

  /** Until somebody tries it, the latest split is the example. */
  draw(state) {
    const latest = state.snapshot.recent.find((row) => row.choice === "split" && row.status === "ok");
    if (this.tried || !latest || latest.id === this.example || performance.now() - this.shownAt < EXAMPLE_MS) return;
    this.example = latest.id;
    this.shownAt = performance.now();
    this.tell(latest.id, () => !this.tried, "The latest split: ").catch(() => null); // the router may have forgotten it
  }

  async send() {
    this.running = this.tried = true;
    byId("send").disabled = true;
    byId("life").replaceChildren();
    try {
      await this.ask();
    } catch (error) {
      byId("answer").replaceChildren(h("p", { class: "problem" }, error.message));
    } finally {
      this.running = false;
      byId("send").disabled = false;
    }
  }

  async ask() {
    const path = byId("path").value, begun = performance.now(), passed = () => (performance.now() - begun) / 1000;
    const body = { messages: [{ role: "user", content: byId("prompt").value }], max_tokens: Number(byId("length").value) || 48, stream: true };
    const more = { "content-type": "application/json", ...(path ? { "x-tollbridge-policy": path } : {}) };
    const said = h("p", { class: "said" }), what = h("p", { class: "read" }, "sent, nothing has come yet");
    byId("answer").replaceChildren(what, said);
    const response = await fetch("../v1/chat/completions", { method: "POST", headers: headers(more), body: JSON.stringify(body) });
    const told = response.headers.get("x-tollbridge-decision");
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `The router answered ${response.status}.`);
    const decision = JSON.parse(told);
    let first = null;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data), text = event.choices?.[0]?.delta?.content;
      if (event.error) throw new Error(event.error.message);
      if (first === null) {
        first = passed();
        what.replaceChildren(mark(decision.choice), ` ${decision.choice}, first token here after ${seconds(first)}`);
      }
      if (text) said.append(text);
    }
    what.append(`, all after ${seconds(passed())}`);
    await this.tell(decision.id);
  }

  async tell(id, wanted = () => true, before = "") {
    for (let at = 0; at < RECORD_TRIES; at += 1) {
      const response = await fetch(`../decisions/${encodeURIComponent(id)}`, { headers: headers() });
      const record = response.ok ? await response.json() : null;
      if (!record || (record.happened.status ?? "running") !== "running") {
        if (record && wanted()) byId("life").replaceChildren(h("p", { class: "reason" }, before, record.decision.why), timeline(record));
        return;
      }
      await new Promise((over) => setTimeout(over, 50));
    }
  }
}
