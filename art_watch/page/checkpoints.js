// The kept steps of a run, with the names and commands that use them.

import { look, ofModel } from "./api.js";
import { ago, button, bytes, el, empty, number, refill, row, table } from "./dom.js";
import { runHead, runPage } from "./run.js";

const COLUMNS = [["Step"], ["Reward it earned", true], ["Validation", true], ["Made"], ["Size", true], ["Name for inference"], ["Export"]];

const NOTE = "A step earned its reward by the rollouts that it sampled; charts show it at the step that was trained on them, one later. "
  + "Unchanged: the job trained nothing, and the weights are those of the step before.";

// Text to copy. Browsers copy only on https and on this machine; elsewhere the text is selected.
function copyable(text) {
  const code = el("code", {}, text);
  const copy = async (event) => {
    try {
      await navigator.clipboard.writeText(text);
      event.target.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      event.target.textContent = "Selected";
    }
    setTimeout(() => { event.target.textContent = "Copy"; }, 2000);
  };
  return el("span", { class: "copy" }, code, button("Copy", copy, { class: "small", "aria-label": `Copy ${text}` }));
}

export async function checkpoints(route) {
  const list = el("div");
  const refresh = async () => {
    const found = (await look(ofModel(route, "checkpoints"))).checkpoints.reverse();
    refill(list, ...(found.length ? [table("Checkpoints", COLUMNS, found.map(rowOf)), el("p", { class: "note" }, NOTE)] : [empty("No checkpoints are kept.")]));
  };
  const rowOf = (each) => {
    const name = `${route.project}/${route.name}@${each.step}`;
    const marks = [each.is_best && el("b", { class: "badge good" }, "best"), each.unchanged && el("span", { class: "badge" }, "unchanged")];
    return row(COLUMNS, [
      el("span", {}, number(each.step), marks), number(each.reward), number(each.val_reward), ago(each.created_at),
      bytes(each.size_bytes), copyable(name), copyable(`art export ${name} DIR`),
    ]);
  };
  await refresh();
  return runPage(route, "Checkpoints", el("div", {}, runHead(route, "checkpoints"), list), { refresh });
}
