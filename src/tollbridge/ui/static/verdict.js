// The answer in one sentence, the figures below it, and what is wrong, in words.

import { byId, h, say } from "./dom.js";
import { clock, count, percent, plural, seconds } from "./format.js";

const MARGIN = 1.1; // nearer than that it is neither

export function judge(totals) {
  const { split = 0, toll_s: toll = 0, avoided_s: avoided = 0 } = totals;
  if (!split) return ["Nothing has been split so far", "no"];
  if (!toll && !avoided) return [`${plural(split, "split")} so far; what they cost is not known yet`, "no"];
  if (avoided > toll * MARGIN) return ["Splitting is paying off", "yes"];
  if (toll > avoided * MARGIN) return ["Splitting is not paying off", "not"];
  return ["Splitting costs about what it spares", "no"];
}

export class Verdict {
  draw(state) {
    const now = state.snapshot;
    const [sentence, mood] = judge(now.totals);
    const title = byId("verdict");
    say(title, sentence);
    title.dataset.mood = mood;
    say(byId("because"), this.because(now));
    const ready = now.workers.filter((worker) => worker.ready).length;
    say(byId("about"), `${now.model.split("/").at(-1)} · policy ${now.policy} · ${ready} of ${plural(now.workers.length, "worker")} ready`);
    this.tiles(state);
  }

  because(now) {
    const { split = 0, requests = 0, toll_s: toll = 0, avoided_s: avoided = 0 } = now.totals;
    const since = `since ${clock(now.started_at)}`;
    if (!split) return `${plural(requests, "request")} ${since}, all of them local.`;
    return `${seconds(avoided)} of stalls spared for ${seconds(toll)} of toll: ${count(split)} of ${plural(requests, "request")} were split ${since}.`;
  }

  tiles(state) {
    const now = state.snapshot, totals = now.totals, window = now.window;
    const rates = state.rates(10);
    const tiles = [
      ["in flight", count(now.in_flight), now.waiting ? `${count(now.waiting)} wait` : "none waits"],
      ["requests/s", rates ? rates.ended.toFixed(1) : "–", rates ? `${rates.good.toFixed(1)} within SLO` : ""],
      ["first token p95", seconds(window.ttft_p95_s), `SLO ${seconds(now.slo_ttft_s)}`, window.ttft_p95_s > now.slo_ttft_s],
      ["time per token p95", seconds(window.tpot_p95_s), `SLO ${seconds(now.slo_tpot_s)}`, window.tpot_p95_s > now.slo_tpot_s],
      ["split", percent(totals.requests ? (totals.split ?? 0) / totals.requests : 0), `${count(totals.verified ?? 0)} verified`],
      ["prefix cache", percent(totals.cacheable_tokens ? (totals.cached_tokens ?? 0) / totals.cacheable_tokens : NaN), "of prompt tokens hit"],
    ];
    const list = byId("tiles");
    if (list.childElementCount !== tiles.length) {
      list.replaceChildren(...tiles.map(([name]) => h("div", {}, h("dt", {}, name), h("dd", { class: "big" }), h("dd", { class: "small" }))));
    }
    tiles.forEach(([, big, small, late], at) => {
      const [, value, more] = list.children[at].children;
      say(value, big);
      say(more, small);
      list.children[at].classList.toggle("late", Boolean(late));
    });
  }
}

const LEVELS = { bad: "Problem", warn: "Attention", note: "Note" };

export class Alerts {
  draw(state) {
    const list = byId("alerts");
    const wanted = state.snapshot.alerts;
    const text = wanted.map((alert) => alert.level + alert.text).join("\n");
    if (text === this.shown) return; // a live region speaks when it is touched
    this.shown = text;
    list.replaceChildren(...wanted.map((alert) => h("li", { class: alert.level, "data-code": alert.code }, h("strong", {}, LEVELS[alert.level]), " ", alert.text)));
  }
}
