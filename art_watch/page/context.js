// What a run is: base model, times, trained tokens, the configuration in force, and what its jobs noted.

import { aboutSection } from "./about.js";
import { look, ofModel } from "./api.js";
import { ago, duration, el, number, plural, prose, refill, setting, short } from "./dom.js";

const SHOWN_NOTES = 3;

// A panel, and the function that reads it again.
export function contextPanel(route) {
  const node = el("div");
  const note = el("div"); // tags and notes; a form that is open stays while the panel is renewed
  let isEdited = false, noted = "";
  const isOpen = (value = isEdited) => { isEdited = value; return value; };
  let hasAll = false; // whether older notes and the whole configuration are shown, which stays when the panel is new
  const refresh = async () => show(await look(ofModel(route, "context")));
  const showAbout = (found) => {
    const text = JSON.stringify([found.about, found.can_change, isEdited]);
    if (text === noted || (isEdited && note.querySelector("form"))) return;
    noted = text;
    note.replaceChildren(aboutSection(route, found.about, found.can_change, isOpen, async () => {
      noted = "";
      note.replaceChildren();
      await refresh();
      note.querySelector("input, button")?.focus();
    }));
  };
  const show = (found) => {
    showAbout(found);
    const changed = Object.entries(found.changed).filter(([name]) => name !== "learning_rate");
    const facts = [
      ["Base model", found.base_model && [found.base_model, found.lora && el("span", { class: "muted" }, ` rank ${found.lora.rank}`)]],
      ["Started", found.started_at && ago(found.started_at)],
      ["Newest step", found.last_at && ago(found.last_at)],
      ["Duration", found.started_at && found.last_at && duration((Date.parse(found.last_at) - Date.parse(found.started_at)) / 1000)],
      ["Trained tokens", found.num_jobs > 0 && [number(found.trained_tokens),
        found.num_trained_steps > 0 && found.num_trained_steps < found.num_jobs && el("span", { class: "muted" }, ` in ${short(found.num_trained_steps)} of ${plural(found.num_jobs, "step")}`)]],
      ...costFacts(found),
      ["Learning rate", found.learning_rate !== null && found.learning_rate !== undefined && setting(found.learning_rate)],
      ["Configuration", changed.length > 0
        ? changed.map(([name, value], place) => [place > 0 && ", ", el("span", { class: "muted" }, `${name} `), setting(value)])
        : found.num_jobs > 0 && el("span", { class: "muted" }, "not known: its jobs are not on disk")],
    ].filter(([, value]) => value);
    const rest = found.notes.slice(SHOWN_NOTES), config = Object.entries(found.config);
    refill(node, el("section", { class: "panel", "aria-label": "About this run" },
      el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      found.idle && el("p", { class: "bad" }, prose(found.idle)),
      unusedList(found.costs),
      noteList(found.notes.slice(0, SHOWN_NOTES)),
      (rest.length > 0 || config.length > 0) && el("details", { open: hasAll, ontoggle: (event) => { hasAll = event.target.open; } },
        el("summary", {}, [rest.length && plural(rest.length, "older note"), config.length && "the whole configuration in force"].filter(Boolean).join(", ")),
        noteList(rest),
        el("dl", { class: "facts" }, config.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, setting(value))))))));
  };
  return { node: el("div", {}, note, node), refresh };
}

function noteList(notes) {
  return notes.length > 0 && el("ul", { class: "notes" }, notes.map((note) => el("li", { class: note.is_bad && "bad" }, el("b", {}, stepsOf(note)), " ", prose(note.text))));
}

// What the jobs of the run have cost.
function costFacts({ costs, price, about, logged_costs: logged }) {
  return [
    ["Sampled for training", costs && [number(costs.num_tokens), el("span", { class: "muted" }, ` tokens in ${plural(costs.num_rollouts, "rollout")}`)]],
    ["Time in steps", costs && duration(costs.step_seconds)],
    ["Price", price !== null && [number(price), el("span", { class: "muted" }, ` at ${short(about.price_per_hour)} an hour`)]],
    ["Logged costs", logged > 0 && number(logged)],
  ];
}

// The rollouts that trained nothing, by reason.
function unusedList(costs) {
  if (!costs?.unused.length) return null;
  const [rollouts, tokens] = ["num_rollouts", "num_tokens"].map((name) => costs.unused.reduce((sum, each) => sum + each[name], 0));
  const share = costs.num_tokens ? `, ${Math.round((100 * tokens) / costs.num_tokens)}% of the tokens sampled for training` : "";
  return el("div", { class: "unused" },
    el("p", {}, `${short(rollouts)} of ${plural(costs.num_rollouts, "rollout")} trained nothing${share}:`),
    el("ul", { class: "notes" }, costs.unused.map((each) => el("li", {},
      el("b", {}, `${plural(each.num_rollouts, "rollout")}${each.num_tokens ? `, ${plural(each.num_tokens, "token")}` : ""}:`), " ", prose(each.reason)))));
}

function stepsOf({ first, last, count, has_older_numbers: hasOlder }) {
  const newest = hasOlder ? "; in the newest:" : ":";
  if (last === null) return `${plural(count, "job")}${newest}`;
  return first === last ? `step ${short(last)}${newest}` : `steps ${short(first)} to ${short(last)} (${plural(count, "job")})${newest}`;
}
