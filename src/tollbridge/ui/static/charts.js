// The charts. Lines by uPlot; requests are drawn on top, one sign each: a circle for local, a diamond for split.

import { byId, say } from "./dom.js";
import { count, percent, plural, rate, seconds } from "./format.js";
import { colour } from "./theme.js";

const HEIGHT = 190; // as style.css has it
const FONT = "12px system-ui, sans-serif";

/** Draw {x, y, choice, bad} of `dots()` into the plot. */
function signs(dots) {
  return { hooks: { draw: (plot) => {
    const { ctx } = plot, size = 3.6 * devicePixelRatio, { left, top, width, height } = plot.bbox;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    for (const dot of dots()) {
      const x = plot.valToPos(dot.x, "x", true), y = Math.min(Math.max(plot.valToPos(dot.y, "y", true), top), top + height);
      ctx.beginPath();
      if (dot.choice === "split") {
        ctx.moveTo(x, y - size * 1.35); ctx.lineTo(x + size * 1.35, y); ctx.lineTo(x, y + size * 1.35); ctx.lineTo(x - size * 1.35, y); ctx.closePath();
      } else ctx.arc(x, y, size, 0, 7);
      ctx.fillStyle = colour(dot.choice);
      ctx.globalAlpha = dot.old ? 0.45 : 0.85;
      ctx.fill();
      if (dot.bad) { ctx.globalAlpha = 1; ctx.strokeStyle = colour("bad"); ctx.lineWidth = 1.5 * devicePixelRatio; ctx.stroke(); }
    }
    ctx.restore();
  } } };
}

class Chart {
  /** `lines` are {label, colour, dash, fill, width}; `x` and `y` say how axes read. */
  constructor(id, { lines, x, y, dots = () => [], height = HEIGHT }) {
    this.height = height;
    this.place = byId(id);
    this.read = byId(`${id}-read`);
    this.setup = { lines, x, y };
    this.dots = dots;
    this.data = null;
    this.place.setAttribute("role", "img");
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.place);
  }

  size() {
    return { width: Math.max(this.place.clientWidth, 200), height: this.height };
  }

  restyle() {
    this.plot?.destroy();
    this.plot = null;
  }

  show(data, words) {
    this.data = data;
    if (!this.plot) this.plot = this.make();
    this.plot.setData(data);
    say(this.read, words);
    this.place.setAttribute("aria-label", words);
  }

  make() {
    const { lines, x, y } = this.setup, ink = colour("muted"), grid = { stroke: colour("line"), width: 1 };
    const axis = (more) => ({ stroke: ink, font: FONT, grid, ticks: { show: false }, ...more });
    return new uPlot({
      ...this.size(), cursor: { show: false }, legend: { show: false }, padding: [10, 18, 0, 0], plugins: [signs(() => this.dots())],
      scales: { x: { time: false, ...x.scale }, y: y.scale ?? {} },
      axes: [axis({ values: (_, values) => values.map(x.words), space: x.space ?? 60, size: 28, ...(x.splits ? { splits: x.splits } : {}), ...(x.filter ? { filter: x.filter } : {}) }),
        axis({ values: (_, values) => values.map(y.words), size: 58, gap: 4, ...(y.splits ? { splits: y.splits } : {}), ...(y.filter ? { filter: y.filter } : {}) })],
      series: [{}, ...lines.map((line) => ({
        label: line.label, stroke: () => colour(line.colour), width: line.width ?? 2, dash: line.dash, points: { show: false },
        spanGaps: true, fill: line.fill ? () => colour(line.fill) : undefined, paths: line.steps ? uPlot.paths.stepped({ align: 1 }) : undefined,
      }))],
    }, this.data, this.place);
  }
}

// Time runs from the right: 0 is now.
let span = 300;
const sinceNow = (value) => (value === 0 ? "now" : span > 120 ? `${Math.round(value / 60)} min` : `${value} s`);
const ago = { scale: { range: () => [-span, 0] }, words: sinceNow, splits: () => Array.from({ length: 6 }, (_, at) => -(span / (span === 120 ? 4 : 5)) * at).filter((each) => each >= -span).reverse() };

const DECADES = [0.0001, 0.001, 0.01, 0.1, 1, 10, 100, 1000];
/** A logarithmic axis over the decades that hold `reach()`, its least and greatest values, and the lines. */
const logSeconds = (reach) => ({
  scale: { distr: 3, range: (_, min, max) => {
    const [low, high] = reach(), least = Math.min(low || 0.1, min || 0.1), most = Math.max(high || 0, max || 0);
    return [10 ** Math.max(Math.floor(Math.log10(least) + 0.001), -4), most * 1.4];
  } },
  words: (value) => (value >= 1 ? `${value} s` : value >= 0.001 ? `${Math.round(value * 1e3)} ms` : `${value * 1e3} ms`),
  splits: (plot, _, min, max) => DECADES.filter((each) => each >= min * 0.99 && each <= max * 1.01),
  filter: (_, splits) => splits,
});
const reachOf = (values) => (values.length ? [Math.min(...values), Math.max(...values)] : [0, 0]);

function overTime(id, field, slo, p95) {
  let now = 0, rows = [];
  const chart = new Chart(id, {
    x: ago, y: logSeconds(() => reachOf(rows.map((row) => row[field]))),
    lines: [{ label: "p95", colour: "ink", width: 1.5 }, { label: "SLO", colour: "bad", dash: [6, 4], width: 1.5 }],
    dots: () => rows.map((row) => ({ x: row.at + row.total_s - now, y: row[field], choice: row.choice, bad: row.in_slo === false, old: row.total_s === 0 })),
  });
  chart.draw = (state) => {
    const snapshot = state.snapshot, limit = snapshot[slo];
    now = snapshot.at;
    span = state.span;
    rows = state.recentRows().filter((row) => row[field] && row.total_s !== undefined);
    const from = Math.max(0, state.samples.findIndex((sample) => sample.at > now - span));
    const samples = state.samples.slice(from);
    const xs = samples.map((sample) => sample.at - now);
    chart.show([[-span, ...xs, 0.001], [null, ...samples.map((sample) => sample.window[p95] ?? null), null], Array(xs.length + 2).fill(limit)], wordsOf(rows, field, limit));
  };
  return chart;
}

function wordsOf(rows, field, limit) {
  const part = (choice) => {
    const values = rows.filter((row) => row.choice === choice).map((row) => row[field]).sort((a, b) => a - b);
    return values.length ? `${choice} ${seconds(values[Math.floor(values.length / 2)])}` : null;
  };
  const medians = [part("local"), part("split")].filter(Boolean).join(", ");
  if (!medians) return `No streamed request lately. SLO ${seconds(limit)}.`;
  const late = rows.filter((row) => row[field] > limit).length;
  return `Medians shown: ${medians}. ${late ? `${count(late)} of ${count(rows.length)} above` : "All within"} the SLO of ${seconds(limit)}.`;
}

function goodput() {
  const chart = new Chart("goodput", {
    x: ago, y: { scale: { range: (_, min, max) => [0, Math.max(1, (max || 0) * 1.15)] }, words: (value) => `${value}/s` },
    lines: [{ label: "ended", colour: "muted", fill: "haze", width: 1.5 }, { label: "within SLO", colour: "good", width: 2 }],
  });
  chart.draw = (state) => {
    const now = state.snapshot.at, past = before(state, now);
    const live = state.samples.map((sample, at) => ({ x: sample.at - now, ...(state.rates(5, at) ?? { ended: null, good: null }) })).filter((each) => each.x > -span);
    const all = [...past, ...live], last = state.rates(10);
    const share = state.snapshot.window.slo_share ?? null;
    const words = last ? `${last.ended.toFixed(1)} requests/s end, ${last.good.toFixed(1)}/s of them within both SLOs${share === null ? "" : ` (${percent(share)} lately)`}.` : "Counting.";
    chart.show([all.map((each) => each.x), all.map((each) => each.ended), all.map((each) => each.good)], words);
  };
  return chart;
}

/** Requests per second before the page was opened, from the rows that the router still had, five seconds each. */
function before(state, now) {
  const first = state.samples[0].at, bins = new Map();
  for (const row of state.rows.values()) {
    const end = row.at + (row.total_s ?? 0);
    if (end >= first || end < now - span) continue;
    const bin = Math.floor((end - first) / 5), each = bins.get(bin) ?? { ended: 0, good: 0 };
    each.ended += 0.2;
    each.good += row.in_slo ? 0.2 : 0;
    bins.set(bin, each);
  }
  if (!bins.size) return [];
  const points = [];
  for (let bin = Math.min(...bins.keys()); bin < 0; bin += 1) points.push({ x: first + bin * 5 + 2.5 - now, ended: 0, good: 0, ...bins.get(bin) });
  return points;
}

function payoff() {
  const chart = new Chart("payoff", {
    x: ago, y: { scale: { range: (_, min, max) => [0, Math.max(0.01, (max || 0) * 1.15)] }, words: (value) => seconds(value) },
    lines: [{ label: "stall avoided", colour: "good", fill: "goodhaze", steps: true }, { label: "toll paid", colour: "split", steps: true }],
  });
  chart.draw = (state) => {
    const { totals, at: now } = state.snapshot;
    let avoided = totals.avoided_s ?? 0, toll = totals.toll_s ?? 0;
    const points = [[0, avoided, toll]];
    const rows = state.recentRows().filter((row) => row.choice === "split" && row.status === "ok").reverse();
    for (const row of rows) { // back from the totals of now
      points.push([row.at + row.total_s - now, avoided, toll]);
      avoided -= row.avoided_s ?? 0;
      toll -= row.toll_s ?? 0;
    }
    points.push([-span, avoided, toll]);
    points.reverse();
    const floor = (value) => Math.max(value, 0);
    chart.show([points.map((each) => each[0]), points.map((each) => floor(each[1])), points.map((each) => floor(each[2]))],
      `Stalls avoided ${seconds(totals.avoided_s ?? 0)} (green), toll paid ${seconds(totals.toll_s ?? 0)} (amber).`);
  };
  return chart;
}

const LENGTHS = [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768];

function breakEven() {
  let rows = [];
  const chart = new Chart("even", {
    x: { scale: { distr: 3, log: 2, range: (_, min, max) => [min || 32, max || 4096] }, words: (value) => count(value), splits: (plot, _, min, max) => LENGTHS.filter((each, at) => each >= min && each <= max && (plot.width > 380 || at % 2 === 0)), space: 40, filter: (_, splits) => splits },
    y: logSeconds(() => reachOf(rows.map((row) => row.y))), height: 250,
    lines: [{ label: "stall if local", colour: "local" }, { label: "toll if split", colour: "split", dash: [8, 3] }],
    dots: () => rows,
  });
  chart.draw = (state) => {
    const even = state.snapshot.break_even;
    if (!even) {
      rows = [];
      chart.show([[32, 4096], [null, null], [null, null]], "Nothing is measured yet: a few requests of each kind, and the curves appear.");
      return;
    }
    rows = [...state.rows.values()].map(pointOf).filter(Boolean);
    const longest = Math.max(1024, ...rows.map((row) => row.x * 1.5)), to = even.num_tokens.findIndex((each) => each >= longest);
    const cut = (values) => values.slice(0, to < 0 ? values.length : to + 1).map((value) => value || null);
    say(byId("even-sub"), `${even.prefill} to ${even.decode} as measured; today's requests as points`);
    chart.show([cut(even.num_tokens), cut(even.stall_s), cut(even.toll_s)], evenWords(even));
  };
  return chart;
}

const evenWords = (even) => (even.tokens_at_par === null
  ? "On this link a split costs its request more than it spares one neighbour, at any length shown: it takes several neighbours."
  : `From ${plural(even.tokens_at_par, "uncached token")} on, a split (amber) costs its request less than a local prefill (blue) stalls one neighbour.`);

function pointOf(row) {
  if (row.choice === "split") return row.toll_s && row.lacked_tokens ? { x: row.lacked_tokens, y: row.toll_s, choice: "split", bad: row.verified === false, old: true } : null;
  const computed = (row.prompt_tokens ?? 0) - (row.cached_tokens ?? 0);
  return row.prefill_s && computed > 0 ? { x: computed, y: row.prefill_s, choice: "local", old: true } : null;
}

export function makeCharts() {
  return [overTime("ttft", "ttft_s", "slo_ttft_s", "ttft_p95_s"), overTime("gap", "longest_gap_s", "slo_itl_s", "gap_p95_s"), goodput(), payoff(), breakEven()];
}
