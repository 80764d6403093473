// The rollouts of a step: each group side by side, the highest reward first.

import { look, ofModel } from "./api.js";
import { align, button, el, empty, hashOf, keepSettings, link, number, plural, refill, select, setting, short } from "./dom.js";
import { runHead, runPage } from "./run.js";

const SHOW = [
  ["", "all rollouts"], ["failures", "groups with failures"], ["dropped", "rollouts with dropped turns"],
  ["length", "answers cut by length"], ["signal", "groups with signal"],
];

const MAX_OWN = 3; // metrics of a rollout on its card

// Buttons and a slider for the steps of a split. `open(step)` shows another one.
export function stepTools(steps, step, open, keys = ["ArrowLeft", "ArrowRight"]) {
  const place = steps.indexOf(step);
  const go = (next) => button(next < place ? "‹ Step" : "Step ›", () => open(steps[next]), {
    id: next < place ? "earlier" : "later", disabled: steps[next] === undefined, "aria-keyshortcuts": keys[next < place ? 0 : 1],
    "aria-label": next < place ? "Earlier step" : "Later step",
  });
  const slider = el("input", {
    type: "range", id: "steps", min: 0, max: steps.length - 1, value: place, "aria-label": "Step",
    "aria-valuetext": `step ${step}`, onchange: (event) => open(steps[event.target.value]),
  });
  return el("div", { class: "group" }, go(place - 1), slider, go(place + 1), el("b", {}, `step ${short(step)}`), el("span", { class: "muted" }, `of ${short(steps.at(-1))}`));
}

export async function groups(route) {
  const { settings } = route;
  const readSplits = async () => (await look(ofModel(route, "rollouts"))).splits;
  const splits = await readSplits();
  const split = route.parts[4] ?? (splits.train ? "train" : Object.keys(splits)[0]);
  const steps = splits[split] ?? [];
  const step = route.parts[5] === undefined ? steps.at(-1) : Number(route.parts[5]);
  const node = el("div", {}, runHead(route, "rollouts", split ? [`${split} step ${step ?? "–"}`] : []));
  const page = runPage(route, "Rollouts", node, { up: hashOf(["run", route.project, route.name]) });
  if (step === undefined) {
    node.append(empty(split ? `There are no rollouts of split ${split}.` : "This run has no rollouts on disk.", "They are in the folder trajectories."));
    const refresh = async () => {
      if (JSON.stringify(await readSplits()) !== JSON.stringify(splits)) dispatchEvent(new Event("hashchange"));
    };
    return { ...page, refresh };
  }
  route.parts = ["run", route.project, route.name, "rollouts", split, String(step)];
  const read = () => look([...ofModel(route, "rollouts", split), step], settings.text ? [["text", settings.text]] : []);
  let found = (await read()).groups;
  const list = el("div"), places = el("div", { class: "tools" });
  const open = (next, of = split) => { location.hash = hashOf(["run", route.project, route.name, "rollouts", of, next], settings); };
  const show = () => {
    const shown = found.map((group) => ({ ...group, rollouts: group.rollouts.filter((each) => isWanted(each, group, settings)) }))
      .filter((group) => group.rollouts.length || (group.failures.length && isPlain(settings)) || group.is_unreadable);
    refill(list, ...(shown.length ? shown.map((group) => groupSection(route, split, step, group)) : [empty("No rollout of this step matches.", "Change the filters, or the step.")]));
  };
  const filter = (changes) => { keepSettings(route, changes); show(); };
  const bound = (name, label) => el("label", { class: "field" }, label, el("input", {
    type: "number", id: name, step: "any", value: settings[name] ?? "", oninput: (event) => filter({ [name]: event.target.value }),
  }));
  const search = el("form", { class: "group", role: "search", onsubmit: async (event) => {
    event.preventDefault();
    keepSettings(route, { text: text.value });
    found = (await read()).groups;
    show();
  } });
  const text = el("input", { type: "search", id: "text", value: settings.text ?? "" });
  search.append(el("label", { class: "field" }, "Text", text), el("button", {}, "Search"));
  const offer = () => refill(places, stepTools(splits[split] ?? [], step, open),
    select("Split", Object.keys(splits), split, (of) => open(splits[of].at(-1), of), { id: "split" }));
  offer();
  show();
  node.append(places, el("div", { class: "tools" }, bound("min", "Reward from"), bound("max", "to"),
    select("Show", split === "train" ? SHOW : SHOW.slice(0, -1), settings.show ?? "", (value) => filter({ show: value }), { id: "show" }), search), list);
  const refresh = async () => {
    const all = await readSplits();
    if (JSON.stringify(all) === JSON.stringify(splits)) return;
    Object.assign(splits, all);
    offer();
  };
  return { ...page, refresh };
}

const isPlain = ({ min, max, text, show }) => !min && !max && !text && (!show || show === "failures");

function isWanted(rollout, group, { min, max, show }) {
  if (min && !(rollout.reward >= Number(min))) return false;
  if (max && !(rollout.reward <= Number(max))) return false;
  if (show === "failures") return group.failures.length > 0;
  if (show === "dropped") return rollout.num_dropped > 0;
  if (show === "length") return rollout.finish_reason === "length";
  return show === "signal" ? !group.is_dead : true;
}

function groupSection(route, split, step, group) {
  const { project, name } = route;
  const heading = el("h2", { id: `group-${group.index}` }, el("span", { class: "muted" }, `Group ${group.index} `), group.prompt);
  if (group.is_unreadable) return el("section", { class: "panel" }, heading, el("p", { class: "bad" }, "The line of this group is not JSON; a crash may have cut it short."));
  const sorted = [...group.rollouts].sort((a, b) => b.reward - a.reward || a.index - b.index);
  const rewards = sorted.map((each) => each.reward ?? 0);
  const low = Math.min(0, ...rewards), high = Math.max(1, ...rewards);
  const section = el("section", { class: "panel rollouts", "aria-labelledby": heading.id },
    el("div", { class: "tools" }, heading, el("span", { class: "earned" }, "mean ", number(group.mean), " ± ", number(group.std)),
      el("span", { class: "muted" }, plural(sorted.length, "rollout")),
      group.failures.length > 0 && el("b", { class: "badge bad" }, plural(group.failures.length, "failure")),
      group.is_dead && el("b", { class: "badge" }, "dead: equal rewards"),
      split === "train" && link(["run", project, name, "tree", step, group.index], "token tree")),
    el("ol", { class: "cards" }, sorted.map((each) => el("li", {}, card(["run", project, name, "rollout", split, step, group.index, each.index], each, low, high))),
      group.failures.map((each) => el("li", { class: "card failure" }, el("b", {}, `Failed: ${each.type}`), el("p", { class: "preview" }, each.message),
        each.traceback && el("details", {}, el("summary", {}, "Traceback"), el("pre", { tabindex: 0 }, each.traceback))))),
    details("Metadata", group.metadata));
  align([...section.querySelectorAll(".earned .number")]);
  return section;
}

function card(parts, rollout, low, high) {
  const fill = el("span", { class: "fill" });
  fill.style.width = `${(((rollout.reward ?? low) - low) / (high - low)) * 100}%`;
  const own = Object.entries(rollout.metrics).filter(([name]) => name !== "completion_tokens").slice(0, MAX_OWN)
    .map(([name, value]) => `${name} ${setting(typeof value === "boolean" ? Number(value) : value)}`).join(", ");
  const facts = [plural(rollout.num_turns, "turn"), rollout.num_tokens && plural(rollout.num_tokens, "token")].filter(Boolean).join(", ");
  return link(parts, [
    el("span", { class: "line" }, el("b", { class: "earned" }, number(rollout.reward)), el("span", { class: "muted" }, `rollout ${rollout.index}`)),
    el("span", { class: "track" }, fill), own && el("span", { class: "own" }, own), el("span", { class: "muted" }, facts),
    rollout.finish_reason === "length" && el("b", { class: "badge bad" }, "cut by length"),
    rollout.num_dropped > 0 && el("b", { class: "badge bad" }, `${plural(rollout.num_dropped, "turn")} dropped`),
    el("span", { class: "preview" }, rollout.text || "(no text)"),
  ], { class: "card" });
}

// JSON that opens on demand; nothing if it is empty.
export function details(label, value) {
  const isEmpty = !value || (typeof value === "object" && !Object.keys(value).length);
  return isEmpty ? null : el("details", {}, el("summary", {}, label), el("pre", { tabindex: 0 }, typeof value === "string" ? value : JSON.stringify(value, null, 2)));
}
