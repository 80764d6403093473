// Several runs in the same charts, by step, by trained tokens or by time.

import { look } from "./api.js";
import { kindOf } from "./axes.js";
import { Board, Chart } from "./charts.js";
import { el, empty, keepSettings, link, select, short } from "./dom.js";

const TOKENS = "data/step_trainable_assistant_tokens";
const HEIGHT = 300;
const REWARDS = { "train/reward": "Reward", "val/reward": "Validation reward" };
const AXES = { step: "step", tokens: "trained tokens", hours: "hours since the first step" };
const AT = { tokens: (x) => `${short(x)} tokens`, hours: (x) => `${short(x)} h` };

// The values of the axis for each row of a history.
function axisOf(found, axis) {
  if (axis === "tokens") {
    let sum = 0;
    return found.metrics[TOKENS].map((value) => (sum += value ?? 0));
  }
  if (axis === "hours") {
    const times = found.recorded_at.map((time) => (time ? Date.parse(time) / 3.6e6 : null));
    const first = Math.min(...times.filter((time) => time !== null));
    return times.map((time) => (time === null ? null : time - first));
  }
  return found.steps;
}

export async function compare(route) {
  const { settings } = route;
  const ids = [...new Set((settings.runs ?? "").split(",").filter((id) => id.includes("/")))];
  const board = new Board(route, (x) => x === null && board.point(null)), drawing = el("div"), grid = el("div", { class: "charts wide" }), tools = el("div", { class: "tools" }), missing = el("p", { class: "bad" });
  let found = []; // of each run its history, or undefined if there is no such run
  const read = async () => {
    const metrics = [TOKENS, ...Object.keys(REWARDS), settings.metric ?? ""].filter(Boolean).map((name) => ["metric", name]);
    const answers = await Promise.allSettled(ids.map((id) => look(["models", ...id.split("/"), "history"], metrics)));
    const failed = answers.find(({ reason }) => reason && reason.status !== 404);
    if (failed) throw failed.reason;
    found = answers.map(({ value }) => value);
  };
  const show = () => {
    const gone = ids.filter((_, place) => !found[place]);
    missing.textContent = gone.length ? `No such run: ${gone.join(", ")}` : "";
    for (const chart of board.charts) {
      chart.set(ids.map((id, place) => [id, found[place]]).filter(([, history]) => history).map(([id, history]) => ({
        label: link(["run", ...id.split("/")], id),
        x: axisOf(history, settings.by ?? "step"),
        steps: history.steps,
        y: history.metrics[chart.options.metric] ?? [], // chosen while the numbers were on their way
      })));
      chart.read(null);
    }
  };
  const build = () => {
    [...board.charts].forEach((chart) => board.remove(chart));
    const shown = settings.metric ? { ...REWARDS, [settings.metric]: settings.metric } : REWARDS;
    for (const [metric, title] of Object.entries(shown)) grid.append(board.add(new Chart({ title, metric, axis: AXES[settings.by] ?? AXES.step, kind: kindOf(metric), height: HEIGHT, at: AT[settings.by], note: `by ${AXES[settings.by] ?? AXES.step}` })).node);
    drawing.replaceChildren(board.tools(settings.by ?? "step"));
    show();
  };
  const set = async (changes) => {
    keepSettings(route, changes);
    try {
      await read();
    } finally {
      build();
    }
  };
  if (ids.length) await read();
  const names = [...new Set(found.flatMap((each) => each?.names ?? []))].sort();
  tools.append(
    select("By", Object.entries(AXES), settings.by ?? "step", (by) => { board.zoom(null); return set({ by }); }, { id: "by" }),
    select("Also", [["", "choose a metric"], ...names], settings.metric ?? "", (metric) => set({ metric }), { id: "metric" }));
  const node = el("div", {}, el("nav", { "aria-label": "Breadcrumb", class: "crumbs" }, link([], "Runs"), " / compare"),
    el("h1", { tabindex: -1 }, "Comparison"),
    ids.length ? [tools, drawing, missing, grid] : empty("No runs are chosen.", "Mark some in the table of runs."));
  if (ids.length) build();
  const refresh = async () => { await read(); show(); };
  return { title: "Comparison", node, up: "#/", watch: (marks) => ids.map((id) => marks.models[id]), refresh, close: () => board.close() };
}
