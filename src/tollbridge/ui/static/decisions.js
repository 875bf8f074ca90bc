// The stream of decisions, newest first; each opens to every term that went into it, and to what became of it.

import { headers } from "./connection.js";
import { byId, h, mark, say } from "./dom.js";
import { bytes, clock, count, number, rate, seconds } from "./format.js";
import { GROUPS, NAMES } from "./terms.js";
import { timeline } from "./timeline.js";

const MAX_SHOWN = 60;
const PHASES = { prefill: "waits for its first token", transfer: "KV crossing", decode: "decoding" };

export class Decisions {
  constructor() {
    this.list = byId("decisions");
    this.items = new Map();
    byId("filter").addEventListener("change", (event) => { this.list.dataset.show = event.target.value; });
  }

  draw(state) {
    const holding = byId("pause").checked, ended = [...state.rows.values()].slice(-MAX_SHOWN);
    const rows = [...ended, ...state.snapshot.active].sort((a, b) => a.at - b.at).slice(-MAX_SHOWN);
    for (const row of rows) {
      const item = this.items.get(row.id);
      if (item) this.update(item, row);
      else if (!holding) this.add(row);
    }
    if (!holding) this.drop(new Set(rows.map((row) => row.id)));
  }

  add(row) {
    const parts = { choice: h("b"), path: h("span", { class: "path" }), why: h("span", { class: "why" }), time: h("span", { class: "time" }), outcome: h("span", { class: "outcome" }) };
    const body = h("div", { class: "body" });
    const summary = h("summary", {}, h("span", { class: "choice" }, mark(row.choice), " ", parts.choice), parts.path, parts.why, parts.outcome, parts.time);
    const details = h("details", {}, summary, body);
    const item = { at: row.at, row: null, parts, body, summary, element: h("li", { "data-id": row.id }, details) };
    details.addEventListener("toggle", () => details.open && this.open(item));
    const older = [...this.list.children].find((element) => this.items.get(element.dataset.id).at <= row.at);
    this.items.set(row.id, item);
    this.list.insertBefore(item.element, older ?? null);
    this.update(item, row);
  }

  /** Forget all but `wanted`, and what somebody reads. */
  drop(wanted) {
    for (const [id, item] of this.items) {
      if (wanted.has(id) || item.element.firstChild.open) continue;
      item.element.remove();
      this.items.delete(id);
    }
  }

  update(item, row) {
    if (item.row && item.row.status === row.status && item.row.phase === row.phase && item.row.choice === row.choice) return;
    const { parts } = item, failed = row.status === "error" || row.verified === false;
    item.row = row;
    item.element.className = [row.choice, row.status ?? "running", failed ? "failed" : ""].join(" ");
    item.summary.querySelector(".mark").className = `mark ${row.choice}`;
    say(parts.choice, row.choice);
    say(parts.path, row.prefill ? `${row.prefill} → ${row.decode}` : row.decode);
    say(parts.why, row.error || row.why);
    say(parts.time, clock(row.at));
    say(parts.outcome, outcome(row));
    if (item.element.firstChild.open) this.open(item);
  }

  async open(item) {
    try {
      const response = await fetch(`../decisions/${encodeURIComponent(item.row.id)}`, { headers: headers() });
      if (!response.ok) throw new Error("The router does not remember this decision any more.");
      item.body.replaceChildren(...explain(await response.json()));
    } catch (error) {
      item.body.replaceChildren(h("p", { class: "read" }, error.message));
    }
  }
}

function outcome(row) {
  if ((row.status ?? "running") === "running") return PHASES[row.phase ?? "prefill"];
  if (row.status !== "ok") return row.status;
  const late = row.in_slo === false ? ", late" : "";
  if (row.ttft_s === undefined || row.ttft_s === null) return `whole in ${seconds(row.total_s)}${late}`;
  return `${count(row.prompt_tokens ?? 0)} tokens, first in ${seconds(row.ttft_s)}${late}`;
}

const UNITS = { s: seconds, B: bytes, "B/s": rate };
const worded = (value, unit) => (UNITS[unit] ? UNITS[unit](value) : `${number(value)}${unit ? ` ${unit}` : ""}`);

export function explain(record) {
  const { decision, happened } = record, terms = decision.terms ?? {};
  const tables = GROUPS.map(([title, known]) => {
    const rows = known.filter(([name]) => name in terms);
    return rows.length ? table(title, rows.map(([name, words, unit]) => [words, worded(terms[name], unit), name])) : null;
  });
  const unknown = Object.keys(terms).filter((name) => !NAMES.has(name));
  if (unknown.length) tables.push(table("More", unknown.map((name) => [name, number(terms[name]), name])));
  const errors = Object.entries(happened.errors ?? {}).map(([kind, error]) => [kind, `${error > 0 ? "+" : ""}${(error * 100).toFixed(0)} %`, kind]);
  if (errors.length) tables.push(table("Predicted, against what happened", errors));
  return [
    h("p", { class: "reason" }, h("code", {}, decision.reason), " ", decision.why, happened.error ? ` ${happened.error}` : ""),
    h("p", { class: "ids" }, `policy ${decision.policy}`, decision.tokens_from ? `, tokens from ${decision.tokens_from}` : "", `, status ${happened.status ?? "running"}`, happened.split_verified === undefined ? "" : happened.split_verified ? ", split verified" : ", split not verified", ", id ", h("code", {}, decision.id)),
    timeline(record),
    h("div", { class: "terms" }, ...tables),
  ];
}

function table(title, rows) {
  return h("table", {}, h("caption", {}, title), h("tbody", {}, ...rows.map(([words, value, name]) => h("tr", { "data-term": name }, h("th", { scope: "row" }, words), h("td", {}, value)))));
}
