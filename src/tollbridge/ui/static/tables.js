// Transfers, caches and memory, and the workers as a table.

import { byId, h, meter } from "./dom.js";
import { bytes, count, percent, plural, rate } from "./format.js";

const level = (share) => (share > 0.95 ? "bad" : share > 0.8 ? "warn" : "");

export class Transfers {
  draw(state) {
    const { totals, workers, links } = state.snapshot;
    const verified = totals.verified ?? 0, judged = verified + (totals.unverified ?? 0);
    const ends = { done: 0, failed: 0, cancelled: 0 }, reasons = new Map();
    for (const { receive = {} } of workers) {
      for (const kind of Object.keys(ends)) ends[kind] += receive[kind] ?? 0;
      for (const [reason, number] of Object.entries(receive.failures_by_reason ?? {})) reasons.set(reason, (reasons.get(reason) ?? 0) + number);
    }
    for (const [reason, number] of Object.entries(totals.unverified_by_reason ?? {})) if (!reasons.has(reason)) reasons.set(reason, number);
    const wire = totals.wire_s ? (totals.kv_bytes ?? 0) / totals.wire_s : null;
    byId("transfers").replaceChildren(
      meter("splits whose KV all arrived", judged ? verified / judged : 0, judged ? `${count(verified)} of ${count(judged)}` : "none yet", judged && verified < judged ? "warn" : "good"),
      facts([
        ["under way", count(links.reduce((sum, link) => sum + (link.num_transfers ?? 0), 0))],
        ["received in all", bytes(totals.kv_bytes ?? 0)],
        ["per second on the wire", wire ? rate(wire) : "–"],
        ["ended well", count(ends.done)], ["failed", count(ends.failed)], ["given up by a client", count(ends.cancelled)],
        ["second attempts", count(totals.retries ?? 0)], ["streams continued elsewhere", count(totals.continued ?? 0)],
      ]),
      reasons.size ? h("p", { class: "read" }, `Why KV did not come: ${[...reasons].map(([reason, number]) => `${reason} (${count(number)})`).join(", ")}.`) : h("p", { class: "read" }, "No transfer has failed."),
    );
  }
}

export class Memory {
  draw(state) {
    const { workers, bounds, totals } = state.snapshot;
    const hits = totals.cacheable_tokens ? (totals.cached_tokens ?? 0) / totals.cacheable_tokens : 0;
    const rows = [meter("prompt tokens found in a prefix cache", hits, totals.cacheable_tokens ? percent(hits) : "none yet", "good")];
    for (const worker of workers) {
      const { kv_total_tokens: total = 0, kv_used_tokens: used = 0, max_pinned_tokens: most = 0, pinned_tokens: pinned = 0 } = worker;
      const asked = worker.cache_queried_tokens ?? 0, rss = worker.rss_bytes ?? 0, limit = worker.memory_limit_bytes ?? 0;
      if (!worker.ready || !total) continue;
      if (rss && limit) rows.push(meter(`${worker.name}: memory`, rss / limit, `${bytes(rss)} of ${bytes(limit)}`, level(rss / limit)));
      rows.push(meter(`${worker.name}: KV cache`, used / total, `${count(used)} of ${count(total)} tokens`, level(used / total)));
      if (pinned) rows.push(meter(`${worker.name}: held for decode to fetch`, pinned / most, `${count(pinned)} of ${count(most)} tokens`, level(pinned / most)));
      if (asked) rows.push(meter(`${worker.name}: prefix hits`, (worker.cache_hit_tokens ?? 0) / asked, percent((worker.cache_hit_tokens ?? 0) / asked), "good"));
    }
    for (const bound of bounds.filter((each) => each.used || each.name === "requests in flight")) rows.push(meter(`router: ${bound.name.replace(/^router /, "")}`, bound.used / bound.limit, amount(bound), level(bound.used / bound.limit)));
    byId("memory").replaceChildren(...rows);
  }
}

const amount = ({ used, limit, unit }) => (unit === "bytes" ? `${bytes(used)} of ${bytes(limit)}` : `${count(used)} of ${count(limit)}`);

function facts(pairs) {
  return h("dl", { class: "facts" }, ...pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

const COLUMNS = [
  ["worker", (it) => it.name], ["prefers", (it) => it.prefer], ["engine", (it) => it.engine], ["host", (it) => it.host],
  ["state", (it) => (it.ready ? (it.suspect ? "suspect" : "ready") : "not ready")], ["prefill legs", (it) => count(it.num_prefills ?? 0)],
  ["serving", (it) => count(it.num_decodes ?? 0)], ["served", (it) => count(it.num_served ?? 0)],
  ["KV used", (it) => (it.kv_total_tokens ? percent((it.kv_used_tokens ?? 0) / it.kv_total_tokens) : "–")],
  ["sends", (it) => `${count(it.send?.done ?? 0)} of ${count((it.send?.done ?? 0) + (it.send?.failed ?? 0))}`],
  ["receives", (it) => `${count(it.receive?.done ?? 0)} of ${count((it.receive?.done ?? 0) + (it.receive?.failed ?? 0))}`],
];

export class WorkersTable {
  draw(state) {
    const table = byId("workers");
    if (!table.closest("details").open && table.childElementCount) return;
    table.replaceChildren(
      h("caption", { class: "hidden" }, plural(state.snapshot.workers.length, "worker")),
      h("thead", {}, h("tr", {}, ...COLUMNS.map(([name]) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, ...state.snapshot.workers.map((it) => h("tr", { class: it.ready ? "" : "down" }, ...COLUMNS.map(([, value], at) => h(at ? "td" : "th", at ? {} : { scope: "row" }, value(it)))))),
    );
  }
}
