// The token tree of a group: each block is a run of tokens that the same rollouts share, as wide as its tokens.

import { look, ofModel } from "./api.js";
import { button, el, empty, hashOf, link, plural, short, tips } from "./dom.js";
import { runHead, runPage } from "./run.js";

const ROW_PIXELS = 26;
const PREVIEW = 400;

// Gives each node the rows of its leaves: [first, last + 1).
function layOut(nodes) {
  const children = nodes.map(() => []);
  const roots = [];
  nodes.forEach((node) => (node.parent === null ? roots : children[node.parent]).push(node));
  let rows = 0;
  for (const node of nodes) Object.assign(node, { first: Infinity, last: 0 });
  const waiting = [...roots].reverse();
  while (waiting.length) {
    const node = waiting.pop();
    if (children[node.id].length) waiting.push(...[...children[node.id]].reverse());
    else Object.assign(node, { first: rows, last: ++rows });
  }
  for (const node of [...nodes].reverse()) { // a parent comes before its children
    const parent = nodes[node.parent];
    if (parent) Object.assign(parent, { first: Math.min(parent.first, node.first), last: Math.max(parent.last, node.last) });
  }
  return rows;
}

export async function tree(route) {
  const { project, name } = route;
  const [step, group] = route.parts.slice(4);
  const { nodes, num_sequence_tokens: all, num_tree_tokens: computed } = await look(ofModel(route, "trees", step, group));
  const rows = layOut(nodes), length = Math.max(1, ...nodes.map((node) => node.stop));
  const chosen = el("section", { class: "panel", "aria-live": "polite" }, el("p", { class: "muted" }, "Choose a block to read its tokens."));
  const choose = (node) => chosen.replaceChildren(
    el("h2", {}, `Tokens ${node.start} to ${node.stop - 1}`), el("p", {}, facts(node), ", in ", node.rollouts.flatMap((each, place) =>
      [place ? ", " : "", link(["run", project, name, "rollout", "train", step, group, each], `rollout ${each}`)])),
    el("pre", { tabindex: 0 }, node.text));
  const blocks = nodes.map((node) => {
    const width = node.stop - node.start;
    const strips = node.trained.map(([start, stop]) => {
      const strip = el("span", { class: "strip" });
      strip.style.left = `${((start - node.start) / width) * 100}%`;
      strip.style.width = `${((stop - start) / width) * 100}%`;
      return strip;
    });
    const block = button([node.text, strips], () => choose(node), { class: "block", "data-node": node.id, "aria-label": `${facts(node)}: ${node.text.slice(0, 80)}` });
    Object.assign(block.style, {
      left: `${(node.start / length) * 100}%`, width: `${(width / length) * 100}%`,
      top: `${node.first * ROW_PIXELS}px`, height: `${(node.last - node.first) * ROW_PIXELS - 2}px`,
    });
    return block;
  });
  const board = el("div", { class: "board" }, blocks);
  board.style.height = `${rows * ROW_PIXELS}px`;
  tips(board, (target) => {
    const node = nodes[target.dataset?.node];
    return node ? [facts(node), `rollouts ${node.rollouts.join(", ")}`, node.text.slice(0, PREVIEW)] : null;
  });
  const share = 1 - computed / all;
  const saving = el("p", { class: "saving" }, el("b", {}, short(computed)), " tokens instead of ", el("b", {}, short(all)), ": ",
    el("span", { title: String(share) }, `${(share * 100).toFixed(1)} %`), " less to compute.");
  const key = el("p", { class: "legend-scale" }, el("span", { class: "block sample" }, el("span", { class: "strip" })), "trained tokens",
    el("span", { class: "block sample" }), "context", el("span", { class: "muted" }, `0 to ${short(length)} tokens, from left to right`));
  const back = link(["run", project, name, "rollouts", "train", step], `train step ${step}`);
  const node = el("div", {}, runHead(route, "rollouts", [back, `group ${group}`, "token tree"]),
    nodes.length ? [saving, key, board, chosen] : empty("The group has no tokens."));
  return runPage(route, `Token tree ${step}/${group}`, node, { up: hashOf(["run", project, name, "rollouts", "train", step]) });
}

function facts(node) {
  return `${plural(node.stop - node.start, "token")}, ${short(node.num_trained)} trained`;
}
