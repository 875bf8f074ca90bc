// The fleet as a picture: router above, prefill workers left, decode workers right, and the bridges that KV crosses.
// Each request that runs is one sign, and moves to where the request is.

import { s, say } from "./dom.js";
import { bytes, count, percent, plural, rate } from "./format.js";

const MAX_EACH = 6; // workers drawn on a side; the table has all
const LANE = 20; // px from sign to sign
const WIDE = { width: 960, box: 316, small: false, top: 100, router: 230 };
const NARROW = { width: 380, box: 142, small: true, top: 92, router: 170 };
const BOX_HEIGHT = 120, GAP = 18, MARGIN = 4;

export class Fleet {
  constructor(place) {
    this.place = place;
    this.svg = s("svg", { role: "img", class: "fleet" });
    this.back = s("g");
    this.front = s("g");
    this.svg.append(this.back, this.front);
    place.append(this.svg);
    this.signs = new Map(); // request id -> element
    new ResizeObserver(() => this.last && this.draw(this.last)).observe(place);
  }

  draw(state) {
    this.last = state;
    const now = state.snapshot;
    const plan = (this.plan = layout(now.workers, this.place.clientWidth < 620 ? NARROW : WIDE));
    this.svg.setAttribute("viewBox", `0 0 ${plan.width} ${plan.height}`);
    this.svg.setAttribute("aria-label", inWords(now));
    this.back.replaceChildren(...roads(plan), ...bridges(plan, now.links), router(plan, now), ...plan.boxes.map((box) => worker(box, plan)), ...rest(plan));
    this.move(now.active, plan);
  }

  /** Put a sign where each running request is; who has left goes back to the router and out of the picture. */
  move(active, plan) {
    const used = new Map(), alive = new Set();
    for (const row of active) {
      const at = place(row, plan, used);
      if (!at) continue;
      alive.add(row.id);
      let sign = this.signs.get(row.id);
      if (!sign) {
        sign = s("g", { class: "sign" }, s("title"), row.choice === "split" ? s("path", { d: "M0-8 8 0 0 8-8 0Z" }) : s("circle", { r: 6.5 }));
        put(sign, plan.door);
        this.front.append(sign);
        this.signs.set(row.id, sign);
        sign.getBoundingClientRect(); // so that it starts from there
      }
      sign.setAttribute("class", `sign ${row.choice} ${row.phase}`);
      say(sign.firstChild, `${row.choice}, ${PHASES[row.phase]}: ${row.why}`);
      put(sign, at);
    }
    for (const [id, sign] of this.signs) {
      if (alive.has(id)) continue;
      this.signs.delete(id);
      put(sign, plan.door);
      sign.classList.add("gone");
      setTimeout(() => sign.remove(), 500);
    }
  }
}

const PHASES = { prefill: "before its first token", transfer: "KV crossing", decode: "decoding", ended: "ended" };
const put = (sign, [x, y]) => { sign.style.transform = `translate(${x}px, ${y}px)`; };

function layout(workers, form) {
  const left = workers.filter((each) => each.prefer === "prefill");
  let right = workers.filter((each) => each.prefer !== "prefill");
  if (!left.length && right.length > 1) left.push(...right.splice(0, Math.floor(right.length / 2)));
  const boxes = [], more = [];
  [left, right].forEach((side, column) => {
    const x = column ? form.width - MARGIN - form.box : MARGIN;
    side.slice(0, MAX_EACH).forEach((each, at) => boxes.push({ worker: each, x, y: form.top + at * (BOX_HEIGHT + GAP), width: form.box, column }));
    if (side.length > MAX_EACH) more.push({ x: x + form.box / 2, y: form.top + MAX_EACH * (BOX_HEIGHT + GAP), text: `and ${side.length - MAX_EACH} more` });
  });
  const rows = Math.max(1, Math.min(MAX_EACH, Math.max(left.length, right.length)));
  return {
    ...form, boxes, more, byName: new Map(boxes.map((box) => [box.worker.name, box])),
    height: form.top + rows * (BOX_HEIGHT + GAP) - GAP + (more.length ? 24 : 0) + MARGIN, door: [form.width / 2, 66],
  };
}

/** Where a request's sign goes: into the lane of its worker, or onto the bridge. */
function place(row, plan, used) {
  const on = (name, capacity, spot) => {
    const at = used.get(name) ?? 0;
    used.set(name, at + 1);
    return at < capacity ? spot(at) : null;
  };
  const from = plan.byName.get(row.prefill), to = plan.byName.get(row.decode);
  if (row.phase === "transfer" && from && to) {
    return on(`${row.prefill}>${row.decode}`, 8, (at) => deckPoint(from, to, 0.2 + 0.075 * at));
  }
  const box = row.choice === "split" && row.phase === "prefill" ? from : to;
  if (!box) return null;
  return on(box.worker.name, Math.floor((box.width - 24) / LANE), (at) => [box.x + 18 + at * LANE, box.y + 50]);
}

const deck = (box) => box.y + 50;
const edge = (box) => (box.column ? box.x : box.x + box.width);
function deckPoint(from, to, share) {
  return [edge(from) + (edge(to) - edge(from)) * share, deck(from) + (deck(to) - deck(from)) * share];
}

function text(x, y, words, kind = "", anchor = "start") {
  return s("text", { x, y, class: kind, "text-anchor": anchor }, words);
}

function router(plan, now) {
  const x = plan.width / 2 - plan.router / 2;
  return s("g", { class: "box router" }, s("rect", { x, y: 2, width: plan.router, height: 56, rx: 10 }),
    text(plan.width / 2, 25, "router", "name", "middle"),
    text(plan.width / 2, 45, now.waiting ? `${count(now.waiting)} wait for a place` : `${plural(now.in_flight, "request")} inside`, "small", "middle"));
}

function roads(plan) {
  return plan.boxes.filter((box, at) => plan.boxes.findIndex((other) => other.column === box.column) === at).map((box) => {
    const x = box.x + box.width / 2, out = plan.width / 2 + (box.column ? 1 : -1) * plan.router / 2;
    return s("path", { class: "road", d: `M${out} 30H${x + (box.column ? -1 : 1) * 12}Q${x} 30 ${x} 42V${box.y}` });
  });
}

function bridges(plan, links) {
  const shown = links.map((link) => ({ link, from: plan.byName.get(link.prefill), to: plan.byName.get(link.decode) }))
    .filter(({ from, to }) => from && to && from.column !== to.column);
  const alone = shown.length === 1;
  return shown.map(({ link, from, to }) => bridge(plan, link, from, to, alone));
}

/** A deck that fills with what crosses, and, where there is one bridge only, its arch. */
function bridge(plan, link, from, to, alone) {
  const [x1, y1] = deckPoint(from, to, 0), [x2, y2] = deckPoint(from, to, 1);
  const [ux, uy] = deckPoint(from, to, Math.max(link.use ?? 0, 0));
  const group = s("g", { class: `bridge ${link.num_transfers ? "busy" : ""}` }, s("line", { class: "deck", x1, y1, x2, y2 }));
  if (link.use) group.append(s("line", { class: "use", x1, y1, x2: ux, y2: uy }));
  if (alone) group.prepend(arch(x1, x2, y1, plan.small));
  const name = link.goodput_bytes_per_s ? rate(link.goodput_bytes_per_s) : "not measured";
  const use = [link.use === undefined || link.use === null ? null : `${percent(link.use)} used`, link.num_transfers ? `${count(link.num_transfers)} crossing` : null].filter(Boolean).join(", ");
  const [mx, my] = deckPoint(from, to, 0.5);
  if (alone) group.append(text(mx, my + 30, name, "name", "middle"), text(mx, my + 48, use || "free", "small", "middle"));
  else if (!plan.small) group.append(...label(from, to, `${name}${use ? `, ${use}` : ""}`));
  group.append(s("title", {}, `${link.prefill} to ${link.decode}: ${name}, ${use || "free"}`));
  return group;
}

/** Several bridges: each label a third of the way, where the lines have parted. */
function label(from, to, words) {
  const [x, y] = deckPoint(from, to, from.y > to.y ? 0.3 : 0.34);
  return [text(x, y - 7, words, "small halo", "middle")];
}

function arch(x1, x2, y, small) {
  const height = small ? 20 : 34, group = s("g", { class: "arch" });
  group.append(s("path", { d: `M${x1} ${y}C${x1 + (x2 - x1) * 0.25} ${y - height * 1.33} ${x1 + (x2 - x1) * 0.75} ${y - height * 1.33} ${x2} ${y}` }));
  const hangers = small ? 4 : 9;
  for (let at = 1; at <= hangers; at += 1) {
    const t = at / (hangers + 1), x = x1 + (x2 - x1) * (3 * (1 - t) ** 2 * t * 0.25 + 3 * (1 - t) * t ** 2 * 0.75 + t ** 3);
    group.append(s("path", { d: `M${x} ${y}V${y - height * 1.33 * 3 * t * (1 - t)}` }));
  }
  return group;
}

function worker(box, plan) {
  const { worker: it, x, y, width } = box, small = plan.small;
  const state = it.ready ? (it.suspect ? "suspect" : "ready") : "down";
  const group = s("g", { class: `box ${state}` }, s("title", {}, it.ready ? `${it.name}, ${it.engine}` : `${it.name}: ${it.detail}`),
    s("rect", { x, y, width, height: BOX_HEIGHT, rx: 10 }),
    s("circle", { class: "dot", cx: x + 16, cy: y + 19, r: 5 }),
    text(x + 28, y + 24, it.name, "name"),
    text(x + width - 12, y + 24, state === "ready" ? (it.prefer === "any" ? "any" : it.prefer) : state === "down" ? "not ready" : "suspect", "small", "end"));
  if (!it.ready) {
    group.append(text(x + 16, y + 60, small ? "does not answer" : "It takes no requests.", "small"));
    return group;
  }
  group.append(s("line", { class: "lane", x1: x + 8, x2: x + width - 8, y1: y + 64, y2: y + 64 }));
  group.append(...room(box, small));
  const serves = it.num_decodes ?? 0, prefills = it.num_prefills ?? 0;
  group.append(text(x + 12, y + 109, small ? `${serves} served, ${prefills} prefill` : `serves ${serves}, prefills ${prefills}`, "small"));
  if (it.waiting_prefill_tokens && !small) group.append(text(x + width - 12, y + 109, `${plural(it.waiting_prefill_tokens, "token")} wait`, "small", "end"));
  return group;
}

/** Its KV cache: used, and held for others to fetch. */
function room({ worker: it, x, y, width }, small) {
  const total = it.kv_total_tokens ?? 0, inner = width - 24;
  if (!total) return [text(x + 12, y + 86, "KV cache: not told", "small")];
  const used = Math.min((it.kv_used_tokens ?? 0) / total, 1), pinned = Math.min((it.pinned_tokens ?? 0) / total, used);
  const words = small ? `KV ${percent(1 - used)} free` : `KV ${percent(1 - used)} free of ${count(total)} tokens${pinned ? `, ${percent(pinned)} held` : ""}`;
  return [
    text(x + 12, y + 80, words, "small"),
    s("rect", { class: "room", x: x + 12, y: y + 85, width: inner, height: 6, rx: 3 }),
    s("rect", { class: used > 0.95 ? "taken full" : "taken", x: x + 12, y: y + 85, width: inner * used, height: 6, rx: 3 }),
    s("rect", { class: "pinned", x: x + 12, y: y + 85, width: inner * pinned, height: 6, rx: 3 }),
  ];
}

const rest = (plan) => plan.more.map(({ x, y, text: words }) => text(x, y, words, "small", "middle"));

function inWords(now) {
  const workers = now.workers.map((each) => `${each.name}, ${each.prefer}, ${each.ready ? `${each.num_decodes ?? 0} requests and ${each.num_prefills ?? 0} prefill legs` : "not ready"}`);
  const links = now.links.map((each) => `${each.prefill} to ${each.decode}, ${each.goodput_bytes_per_s ? rate(each.goodput_bytes_per_s) : "not measured"}`);
  return `Workers: ${workers.join("; ")}. Links: ${links.join("; ") || "none"}. ${bytes(now.totals.kv_bytes ?? 0)} of KV have crossed.`;
}
