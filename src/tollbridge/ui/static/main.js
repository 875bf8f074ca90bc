// Wires the router's snapshots to the panels. Everything shown comes from `state`.

import { Connection } from "./connection.js";
import { byId, say } from "./dom.js";
import { Alerts, Verdict } from "./verdict.js";
import { Fleet } from "./fleet.js";
import { makeCharts } from "./charts.js";
import { Decisions } from "./decisions.js";
import { Memory, Transfers, WorkersTable } from "./tables.js";
import { followTheme } from "./theme.js";
import { TryIt } from "./tryit.js";
import { State } from "./state.js";

const state = new State();
const panels = [
  new Verdict(), new Alerts(), new Fleet(byId("fleet")), new WorkersTable(), new Decisions(), new Transfers(), new Memory(),
  ...makeCharts(), new TryIt(),
];
const words = { live: "live", lost: "no answer from the router", wait: "connecting" };

function draw() {
  if (document.hidden || !state.snapshot) return;
  for (const panel of panels) panel.draw(state);
}

const connection = new Connection(
  (event, value) => {
    if (event === "history") state.remember(value.rows);
    if (event === "snapshot") {
      state.take(value);
      draw();
    }
  },
  (now) => {
    const live = byId("live");
    if (live.dataset.state === now) return;
    live.dataset.state = now;
    say(live, words[now]);
    document.body.classList.toggle("stale", now === "lost");
  },
);

followTheme(byId("theme"), () => {
  for (const panel of panels) panel.restyle?.();
  draw();
});
document.addEventListener("visibilitychange", draw);
connection.run();
