// The life of one request, from its record: who did what, when. All times are since the decision.

import { h } from "./dom.js";
import { bytes, count, seconds } from "./format.js";

/** Return spans {who, what, from, to, kind} of a record. Reports give lengths; where they began follows from the order. */
export function spans(record) {
  const { decision, happened } = record, split = decision.choice === "split";
  const end = happened.total_s ?? happened.ttft_s ?? 0, first = happened.ttft_s ?? end, found = [];
  const span = (who, what, from, to, kind) => to - from > 0 && found.push({ who, what, from, to, kind });
  if (happened.queue_s) span("router", `waited ${seconds(happened.queue_s)} for a place`, -happened.queue_s, 0, "wait");
  const prefill = split ? happened.prefill_report : happened.decode_report, who = split ? decision.prefill : decision.decode;
  const wait = prefill?.queue_s ?? 0, compute = prefill?.prefill_s ?? 0;
  span(who, `wait ${seconds(wait)}`, 0, wait, "wait");
  span(who, `prefill ${seconds(compute)}, ${count(prefill?.computed_tokens ?? 0)} tokens`, wait, wait + compute, "prefill");
  const transfer = split ? happened.decode_report?.transfer : null;
  if (transfer) span("bridge", `KV ${bytes(transfer.payload_bytes ?? 0)} in ${seconds(transfer.wire_s ?? 0)}`, transfer.wait_s ?? 0, (transfer.wait_s ?? 0) + (transfer.wire_s ?? 0), "transfer");
  span(decision.decode, `${count(happened.completion_tokens ?? 0)} tokens in ${seconds(end - first)}`, first, end, "decode");
  return found;
}

export function timeline(record) {
  const { decision, happened } = record, all = spans(record);
  if (!all.length) return h("p", { class: "read" }, "The workers have not reported times.");
  const from = Math.min(0, ...all.map((span) => span.from)), to = Math.max(...all.map((span) => span.to), happened.total_s ?? 0);
  const at = (time) => `${((time - from) / (to - from)) * 100}%`;
  const lanes = [...new Set(all.map((span) => span.who))].map((who) => {
    const track = h("div", { class: "track" });
    for (const span of all.filter((each) => each.who === who)) {
      const bar = h("span", { class: `span ${span.kind}`, title: span.what });
      bar.style.left = at(span.from);
      bar.style.width = `max(3px, ${((span.to - span.from) / (to - from)) * 100}%)`;
      track.append(bar);
    }
    if (happened.ttft_s !== undefined) {
      const first = h("span", { class: "first" });
      first.style.left = at(happened.ttft_s);
      track.append(first);
    }
    const what = all.filter((each) => each.who === who).map((each) => each.what).join(", ");
    return h("li", {}, h("span", { class: "who" }, who), track, h("span", { class: "what" }, what));
  });
  const firstToken = happened.ttft_s === undefined ? "the answer came whole" : `first token after ${seconds(happened.ttft_s)} (the line)`;
  return h("figure", { class: `life ${decision.choice}` }, h("ol", {}, ...lanes), h("figcaption", {}, `${firstToken}, all after ${seconds(happened.total_s)}`));
}
