// A run: the head that its pages share, and its charts.

import { look, ofModel } from "./api.js";
import { kindOf } from "./axes.js";
import { Board, Chart } from "./charts.js";
import { contextPanel } from "./context.js";
import { ago, button, el, empty, hashOf, keepSettings, link, refill, select, short } from "./dom.js";
import { learningPanel } from "./learning.js";

const GAP = "Engine against trainer, on the same tokens. Only rounding is normal: a mean below 1e-4 in float32, "
  + "0.03 with float16, 0.25 with bfloat16. Above four times that the server trains nothing."; // docs/precision.md
const PHASES = ["engine", "check", "pause", "train", "save", "load", "finish"];
const CHARTS = [
  { title: "Reward", lines: { "train/reward": "train", "val/reward": "validation" }, note: "Mean of the step's rollouts." },
  { title: "Gap of log-probabilities", lines: { "loss/logprob_gap_mean": "mean", "loss/logprob_gap_max": "largest token" }, isLog: true, note: GAP },
  { title: "Ratio tails", kind: "ratio", lines: {
    "loss/importance_ratio_p95": "trainer/engine p95", "loss/importance_ratio_p99": "trainer/engine p99",
    "loss/policy_ratio_p99": "policy/start p99",
  }, note: "1 is no difference. By default trainer/engine counts as at most 2, and the clip begins at 1.2." },
  { title: "Entropy", kind: "amount", lines: { "loss/entropy": "nats" }, note: "Mean over trained tokens. At 0 the policy no longer explores." },
  { title: "Dead groups", kind: "amount", lines: { "data/step_num_groups_dead": "dead", "data/step_num_groups_submitted": "submitted" }, note: "Where all rewards of a group are equal, its tokens have no advantage." },
  { title: "Shared-token saving", kind: "amount", lines: { "data/step_shared_token_saving": "share" }, note: "Tokens that rollouts share and that were computed once." },
  { title: "Clipped tokens", kind: "amount", lines: { "loss/clipped_token_fraction": "share" }, note: "Tokens whose ratio is outside the clip, without gradient." },
  { title: "Seconds of a step", kind: "amount", lines: /^time\/job_(.*)_s$/, isStacked: true, note: "Phases of the job, on top of each other." },
  { title: "Trainer's tokens per second", kind: "amount", lines: { "throughput/avg_trainer_tok_per_s": "tokens / s" } },
];

const OURS = /^(loss|data|time|throughput|costs)\/|^sampled_step|\/(reward|reward_std_dev|exception_rate)$/;
const MAX_OWN = 8;
const REFRESH_SECONDS = 15; // scores come without a new step
const SCORES = { title: "Scores", note: "Mean of the scores of a step's answers, by name." };
const RELEASES = " Vertical lines: releases; dotted ones are not decided, or were set aside.";

// Charts of the first metrics that the user's program logged: of training and validation in one.
function ownCharts(names) {
  const titles = new Set(names.filter((name) => !OURS.test(name)).map((name) => name.replace(/^(train|val)\//, "")));
  return [...titles].slice(0, MAX_OWN).map((title) => ({
    title, kind: kindOf(title), lines: { [`train/${title}`]: "train", [`val/${title}`]: "validation", [title]: "value" },
  }));
}

export function runHead(route, section, tail = []) {
  const { project, name } = route;
  const tabs = [["charts", "Charts", []], ["rollouts", "Rollouts", ["rollouts"]], ["checkpoints", "Checkpoints", ["checkpoints"]]];
  return el("div", { class: "head" },
    el("nav", { "aria-label": "Breadcrumb", class: "crumbs" }, link([], "Runs"), " / ",
      tail.length ? link(["run", project, name], `${project}/${name}`) : `${project}/${name}`,
      tail.map((each) => [" / ", each])),
    el("h1", { tabindex: -1 }, el("span", { class: "muted" }, `${project}/`), name),
    el("nav", { "aria-label": "Run", class: "tabs" }, tabs.map(([key, text, parts]) =>
      link(["run", project, name, ...parts], text, { "aria-current": key === section && "page" }))));
}

const watchRun = (route) => (marks) => marks.models[`${route.project}/${route.name}`];

export function runPage(route, title, node, more = {}) {
  return { title: `${title} – ${route.project}/${route.name}`, node, up: "#/", watch: watchRun(route), ...more };
}

const chartsOf = (names) => [CHARTS[0], ...ownCharts(names), ...CHARTS.slice(1)];

// The lines of a chart for the metrics that the run has: [metric, label].
function linesOf({ lines }, names) {
  if (lines instanceof RegExp) {
    const found = names.filter((name) => lines.test(name)).map((name) => [name, lines.exec(name)[1]]);
    return found.sort(([, a], [, b]) => PHASES.indexOf(a) - PHASES.indexOf(b));
  }
  return Object.entries(lines).filter(([name]) => names.includes(name));
}

export async function charts(route) {
  const { settings } = route;
  const added = settings.also ? JSON.parse(settings.also).map(String) : [];
  const read = async () => {
    const { names } = await look(ofModel(route, "history"));
    const wanted = [...chartsOf(names).flatMap((each) => linesOf(each, names).map(([name]) => name)), ...added];
    return look(ofModel(route, "history"), [...new Set(wanted)].map((name) => ["metric", name]));
  };
  const about = contextPanel(route), learning = learningPanel(route);
  let [found] = await Promise.all([read(), about.refresh(), learning.refresh()]), step = null;
  const grid = el("div", { class: "charts" }), chooser = el("div", { class: "tools" }), stepper = el("div", { class: "tools" });
  const drawing = el("div");
  const at = el("output", { id: "at", for: "step" });
  const slider = el("input", { type: "range", id: "step", min: 0, oninput: () => choose(found.steps[slider.value]) });
  const board = new Board(route, (x) => show(x ?? step));
  const newest = () => {
    const [from, to] = board.shown();
    const place = found.steps.findLastIndex((each) => each >= from && each <= to);
    return place < 0 ? found.steps.length - 1 : place;
  };

  const fill = (chart, lines) => chart.set(lines.map(([name, label]) => ({ label, x: found.steps, steps: found.steps, y: found.metrics[name] ?? [] })));
  const mark = (chart) => {
    chart.marks = learning.marks().filter(({ x }) => found.steps.includes(x));
    chart.options.note = CHARTS[0].note + (chart.marks.length ? RELEASES : "");
    chart.note.textContent = chart.options.note;
  };
  const addChart = (options, lines) => {
    const chart = board.add(new Chart({ ...options }));
    chart.refill = () => {
      if (options.title === CHARTS[0].title) mark(chart);
      if (options.title === SCORES.title) chart.set(learning.lines(found.steps));
      else fill(chart, options.lines ? linesOf(options, found.names) : lines);
    };
    chart.refill();
    grid.append(chart.node);
    return chart;
  };
  const show = (x) => {
    board.point(x);
    const place = x === null ? newest() : found.steps.indexOf(x);
    const name = x !== null ? "" : place === found.steps.length - 1 ? " (newest)" : " (newest shown)";
    at.replaceChildren(`step ${short(found.steps[place])}${name}, `, ago(found.recorded_at[place]), " ",
      link(["run", route.project, route.name, "rollouts", "train", found.steps[place]], "rollouts"));
    if (document.activeElement !== slider) slider.value = place;
  };
  const choose = (x) => { step = x === found.steps[newest()] ? null : x; show(step); };
  const addMetric = (name) => {
    const chart = addChart({ title: name, kind: kindOf(name), extra: button("Remove", () => {
      added.splice(added.indexOf(name), 1);
      shown.delete(name);
      board.remove(chart);
      keep();
    }, { class: "small", "aria-label": `Remove ${name}` }) }, [[name, "value"]]);
  };
  const keep = () => {
    keepSettings(route, { also: added.length ? JSON.stringify(added) : "" });
    offer();
  };
  const offer = () => {
    const rest = found.names.filter((name) => !added.includes(name)), own = rest.filter((name) => !OURS.test(name));
    refill(chooser, select("Add a chart", [["", "choose a metric"], ...own, ...rest.filter((name) => OURS.test(name))], "", async (name) => {
      added.push(name);
      found = await read();
      start();
      keep();
      show(step);
    }, { id: "add-metric" }));
  };
  const shown = new Set();
  // Adds what the run has by now: a metric's chart appears with its first value.
  const addNew = (all, isThere, add) => all.filter((each) => !shown.has(each.title ?? each) && isThere(each)).forEach((each) => {
    shown.add(each.title ?? each);
    add(each);
  });
  const start = () => {
    slider.max = found.steps.length - 1;
    chooser.hidden = !found.steps.length;
    if (!found.steps.length) return;
    addNew([CHARTS[0]], (each) => linesOf(each, found.names).length, addChart);
    addNew([SCORES], () => learning.lines(found.steps).length, addChart);
    addNew(chartsOf(found.names), (each) => linesOf(each, found.names).length, addChart);
    addNew(added, (name) => found.names.includes(name), addMetric);
    if (stepper.childElementCount) return;
    drawing.replaceChildren(board.tools());
    stepper.replaceChildren(slider, el("span", {}, el("label", { class: "muted", for: "step" }, "Numbers of "), at));
    none.replaceChildren();
  };
  const none = el("div", {}, empty("No steps yet.", "The first row of the history appears here by itself."));
  start();
  offer();
  if (found.steps.length) show(null);
  const refresh = async () => {
    [found] = await Promise.all([read(), about.refresh(), learning.refresh()]);
    if (!found.steps.includes(step)) step = null; // rolled back
    start();
    board.charts.forEach((chart) => chart.refill());
    offer();
    if (found.steps.length) show(step);
  };
  const node = el("div", {}, runHead(route, "charts"), about.node, learning.node, none, stepper, drawing, grid, chooser);
  return runPage(route, "Charts", node, { refresh, close: () => board.close(), up: hashOf([]), every: learning.isLive() ? REFRESH_SECONDS : null });
}
