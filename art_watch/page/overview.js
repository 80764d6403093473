// The table of runs, and on a running server where its time goes.

import { look } from "./api.js";
import { ago, button, el, empty, hashOf, keepSettings, link, number, plural, prose, refill, row, sparkline, table } from "./dom.js";

const REFRESH_SECONDS = 5;
const COLUMNS = [["Run"], ["Step", true], ["Reward", true], ["Validation", true], ["Best step"], ["Updated"], ["Logged steps", true], ["Base model"], ["Compare"]];
const SORTS = { last: "updated", id: "name", reward: "reward", val_reward: "validation" };
const ACTIVITIES = [["rollouts", "Rollouts"], ["waiting", "Waiting at the gate"], ["training", "Training"], ["swap", "Swap"], ["starting", "Engine starts"], ["idle", "Idle"]];

export async function overview(route) {
  const { settings } = route;
  let found = await look(["overview"]);
  const chosen = new Set(settings.runs ? settings.runs.split(",") : []);
  const live = el("div"), list = el("div"), count = el("span", { class: "muted" }), comparing = el("span");

  const show = () => {
    refill(live, ...(found.live ? [activityBar(found.live)] : []));
    const wanted = (settings.filter ?? "").toLowerCase().split(/\s+/);
    const models = found.models.filter((model) => {
      const text = `${model.id} ${model.base_model} ${model.tags.join(" ")}`.toLowerCase();
      return wanted.every((word) => text.includes(word));
    }).sort(orderBy(settings.sort ?? "last"));
    count.textContent = models.length === found.models.length ? plural(models.length, "run") : `${models.length} of ${plural(found.models.length, "run")}`;
    if (!found.models.length) return refill(list, empty("No runs yet.", "A run appears when a program registers a model."));
    if (!models.length) return refill(list, empty(`No run contains "${settings.filter}".`));
    refill(list, table("Runs", COLUMNS, models.map((model) => modelRow(model, chosen, choose))));
  };
  const choose = (id, isChosen) => {
    if (isChosen) chosen.add(id);
    else chosen.delete(id);
    keepSettings(route, { runs: [...chosen].join(",") });
    offer();
  };
  const offer = () => comparing.replaceChildren(chosen.size < 2
    ? el("span", { class: "muted" }, "Choose two or more runs to compare them.")
    : link(["compare"], `Compare ${chosen.size} runs`, { class: "button" }, { runs: [...chosen].join(",") }));
  const filter = el("input", {
    type: "search", id: "filter", value: settings.filter ?? "", placeholder: "project, name, base model, tag",
    oninput: (event) => { keepSettings(route, { filter: event.target.value }); show(); },
  });
  const sorts = Object.entries(SORTS).map(([key, text]) => button(text, (event) => {
    keepSettings(route, { sort: key });
    event.target.parentElement.querySelectorAll("button").forEach((each) => each.setAttribute("aria-pressed", each === event.target));
    show();
  }, { "aria-pressed": String(key === (settings.sort ?? "last")) }));
  show();
  offer();
  const node = el("div", {},
    el("h1", { tabindex: -1 }, "Runs"), live,
    el("div", { class: "tools" }, el("label", { class: "field" }, "Filter", filter),
      el("div", { class: "group", role: "group", "aria-label": "Sort by" }, "Sort by", sorts), count, comparing),
    list);
  const refresh = async () => { found = await look(["overview"]); show(); };
  return { title: "Runs", node, watch: (marks) => marks, refresh, every: found.live ? REFRESH_SECONDS : null };
}

function orderBy(sort) {
  if (sort === "id") return (a, b) => a.id.localeCompare(b.id, "en", { numeric: true });
  const key = sort === "last" ? "last_at" : sort;
  const rank = (model) => model[key] ?? (sort === "last" ? "" : -Infinity);
  return (a, b) => (rank(a) < rank(b) ? 1 : rank(a) > rank(b) ? -1 : a.id.localeCompare(b.id));
}

function modelRow(model, chosen, choose) {
  // A model with supervised steps only has no rewards.
  const [what, values] = model.loss === null ? ["Reward", model.rewards] : ["Loss", model.losses];
  const newest = model.loss === null ? number(model.reward) : `loss ${number(model.loss)}`;
  const trend = sparkline(values, `${what} of the last ${values.length} steps`);
  const check = el("input", {
    type: "checkbox", id: `compare-${model.id}`, "aria-label": `Compare ${model.id}`, checked: chosen.has(model.id),
    onchange: (event) => choose(model.id, event.target.checked),
  });
  return row(COLUMNS, [
    [el("a", { href: hashOf(["run", model.project, model.name]) }, el("span", { class: "muted" }, `${model.project}/`), el("wbr"), model.name),
      model.tags.map((tag) => el("span", { class: "badge" }, tag))],
    number(model.step),
    el("span", { class: "reward" }, trend, newest),
    number(model.val_reward),
    model.best ? [number(model.best.step), el("span", { class: "muted" }, ` by ${model.best.metric}`)] : "–",
    ago(model.last_at),
    number(model.num_rows),
    [model.base_model ?? "–", model.rank && el("span", { class: "muted" }, ` rank ${model.rank}`)],
    check,
  ].map((cell) => (Array.isArray(cell) ? el("span", {}, cell) : cell)), { "data-run": model.id });
}

// Activities overlap, so that each has a bar of its own.
export function activityBar({ activity, health }) {
  if (!activity.seconds) return el("p", { class: "muted" }, "The server has just started.");
  const parts = ACTIVITIES.filter(([name]) => name !== "starting" || activity.shares[name]).map(([name, text]) => {
    const share = activity.shares[name] ?? 0;
    const fill = el("span", { class: "fill" });
    fill.style.width = `${Math.round(share * 100)}%`;
    return el("li", { class: name === activity.largest && "largest" }, el("span", {}, text),
      el("b", { title: String(share) }, `${Math.round(share * 100)}%`), el("span", { class: "track" }, fill));
  });
  const reason = health.waits_for && el("p", { class: "muted" }, prose(`Requests wait for ${health.waits_for}.`));
  return el("section", { class: "panel", "aria-labelledby": "activity" }, el("h2", { id: "activity" }, "Where the time goes"),
    el("ul", { class: "activity" }, parts), el("p", {}, prose(activity.sentence)), reason);
}
