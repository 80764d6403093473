// One rollout: its turns with their tokens and where these come from, tools, and what the program recorded.

import { look, ofModel } from "./api.js";
import { button, el, empty, hashOf, keepSettings, link, number, plural, refill, select, signed } from "./dom.js";
import { details, stepTools } from "./groups.js";
import { scoreList } from "./learning.js";
import { runHead, runPage } from "./run.js";
import { COLOURS, hasNumbers, legend, scaleOf, tokenBlock } from "./tokens.js";

const ORIGINS = {
  ids: "token ids in the choice", ledger: "the ledger's record", logprob_entries: "ids in the log-probability entries",
  rendered: "the text, rendered", recomputed: "the text, with the trainer's log-probabilities",
};
const CONTINUES = {
  joined: "continues the sequence", dropped: "new sequence: the template removed thinking", ambiguous: "new sequence: several records fit the conversation",
  retokenized: "new sequence: rendering changed tokens", changed: "new sequence: the context changed",
};

export async function rollout(route) {
  const { project, name, settings } = route;
  const [split, step, group, index] = route.parts.slice(4);
  const [found, { splits }] = await Promise.all([look([...ofModel(route, "rollouts"), split, step, group, index]), look(ofModel(route, "rollouts"))]);
  const near = (at, place) => hashOf(["run", project, name, "rollout", split, at, group, place], settings);
  const go = (at, place) => { location.hash = near(at, place); };
  const list = el("div", { class: "turns" }), tools = el("div", { class: "tools" }), bar = el("div", { class: "tools sticky" });
  const choices = Object.entries(COLOURS).filter(([key]) => hasNumbers(key, found.sequences)).map(([key, { label }]) => [key, label]);
  const show = () => {
    const colour = choices.some(([key]) => key === settings.colour) ? settings.colour : choices[0]?.[0];
    const context = { found, colour, scale: colour && scaleOf(colour, found.sequences), hasFigures: settings.figures === "1" };
    refill(bar, ...(colour ? [
      select("Colour by", choices, colour, (value) => { keepSettings(route, { colour: value }); show(); }, { id: "colour" }),
      legend(colour, context.scale),
      el("label", { class: "field" }, el("input", {
        type: "checkbox", id: "figures", checked: context.hasFigures,
        onchange: (event) => { keepSettings(route, { figures: event.target.checked ? "1" : "" }); show(); },
      }), "numbers"),
    ] : [el("p", { class: "muted" }, "No token of this rollout has recorded numbers.")]));
    refill(list, ...found.histories.flatMap((history, place) => [
      found.histories.length > 1 && el("h2", {}, place ? `Additional history ${place}` : "Conversation"),
      ...history.entries.map((entry, position) => turn(entry, position, context)),
      details("Tools", history.tools),
    ]).filter(Boolean), ...found.sequences.map((sequence, place) => wholeSequence(sequence, place, context)));
  };
  const last = found.num_rollouts - 1, at = Number(index);
  tools.append(
    el("div", { class: "group" },
      button("‹ Rollout", () => go(step, at - 1), { id: "before", disabled: at === 0, "aria-keyshortcuts": "ArrowLeft", "aria-label": "Earlier rollout" }),
      button("Rollout ›", () => go(step, at + 1), { id: "after", disabled: at >= last, "aria-keyshortcuts": "ArrowRight", "aria-label": "Next rollout" }),
      el("b", {}, `rollout ${index}`), el("span", { class: "muted" }, `in group ${group} of ${plural(found.num_rollouts, "rollout")}`)),
    stepTools(splits[split] ?? [], Number(step), (next) => go(next, at), ["Shift+ArrowLeft", "Shift+ArrowRight"]));
  if (split === "train" && found.has_token_record) tools.append(link(["run", project, name, "tree", step, group], "token tree"));
  show();
  const tail = [link(["run", project, name, "rollouts", split, step], `${split} step ${step}`), `group ${group}`, `rollout ${index}`];
  const node = el("div", {}, runHead(route, "rollouts", tail), tools,
    el("dl", { class: "panel facts" }, [
      ["reward", found.reward], ["mean of its group", found.group_mean], ...advantageOf(found.sequences), ...Object.entries(found.metrics),
    ].map(([key, value]) =>
      el("div", {}, el("dt", {}, key), el("dd", {}, typeof value === "number" ? number(value) : String(value ?? "–"))))),
    scoreList(found.scores),
    found.prompt && el("p", { class: "prompt" }, el("span", { class: "muted" }, "Prompt "), found.prompt),
    split === "train" && !found.has_token_record && el("p", { class: "muted" }, "There is no record of this step's tokens."),
    bar, list, details("Logs", found.logs?.join("\n")), details("Metadata", found.metadata));
  if (!found.histories.some((history) => history.entries.length)) list.append(empty("The rollout has no messages."));
  return runPage(route, `Rollout ${split} ${step}/${group}/${index}`, node, { up: hashOf(["run", project, name, "rollouts", split, step]) });
}

// The advantage of a rollout's trained tokens; the lowest and the highest, if they differ.
function advantageOf(sequences) {
  const all = sequences.flatMap(({ advantages }) => advantages ?? []).filter((value) => value !== null);
  if (!all.length) return [];
  const [low, high] = all.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [all[0], all[0]]);
  return [["advantage", low === high ? low : `${signed(low)} to ${signed(high)}`]];
}

function turn(entry, position, { found, colour, scale, hasFigures }) {
  const trace = entry.turn, isChoice = entry.sampled_by !== undefined;
  const sequence = trace?.sequence !== undefined ? found.sequences[trace.sequence] : null;
  const label = `Tokens of message ${position}`;
  let body = (entry.reasoning || entry.text) && [entry.reasoning && el("div", { class: "text muted" }, entry.reasoning), el("div", { class: "text" }, entry.text)];
  if (sequence) body = tokenBlock(sequence, trace.start, Math.min(trace.stop, sequence.texts.length), colour, scale, hasFigures, label);
  return el("section", { class: `panel turn role-${/^\w+$/.test(entry.role) ? entry.role : "other"}` },
    el("div", { class: "line" }, el("h3", {}, entry.role, entry.name && ` ${entry.name}`), el("span", { class: "muted" }, `message ${position}`),
      isChoice && origin(entry, trace)),
    body,
    entry.tool_calls.map((call) => el("div", { class: "call" }, el("b", {}, `calls ${call.name}`), el("pre", { tabindex: 0 }, pretty(call.arguments)))));
}

function origin(entry, trace) {
  const facts = [];
  if (!trace) facts.push("no trace of its tokens");
  else if (trace.dropped) facts.push(el("b", { class: "badge bad" }, "dropped"), trace.dropped);
  else {
    facts.push(el("b", { class: "badge", title: `from ${ORIGINS[trace.origin] ?? trace.origin}` }, trace.origin), `from ${ORIGINS[trace.origin] ?? trace.origin}`);
    if (trace.continues) facts.push(el("b", { class: `badge ${trace.continues === "joined" ? "good" : "bad"}` }, trace.continues), CONTINUES[trace.continues] ?? "", trace.difference ?? "");
    if (trace.step !== undefined) facts.push(`sampled by step ${trace.step}`);
    if (trace.stop !== undefined) facts.push(`${plural(trace.stop - trace.start, "token")} at ${trace.start} of sequence ${trace.sequence}`);
  }
  if (!trace && entry.sampled_by?.step !== undefined) facts.push(`sampled by step ${entry.sampled_by.step}`);
  if (entry.finish_reason) facts.push(`ended by ${entry.finish_reason}`);
  return el("span", { class: "origin" }, facts.map((each) => el("span", {}, each)));
}

function wholeSequence(sequence, place, { colour, scale, hasFigures }) {
  const node = el("details", { class: "panel" }, el("summary", {}, `Sequence ${place} as the model read it, ${plural(sequence.ids.length, "token")}`));
  node.addEventListener("toggle", () => {
    if (node.open && node.childElementCount === 1) node.append(tokenBlock(sequence, 0, sequence.ids.length, colour, scale, hasFigures, `Sequence ${place}`));
  });
  return node;
}

// Arguments that are JSON, over several lines.
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return String(text ?? "");
  }
}
