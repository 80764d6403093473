// How a model learns from scores: its state, a canary's two rates, scores by day, name and step, and its releases.

import { look, ofModel } from "./api.js";
import { ago, duration, el, number, plural, prose, refill, row, short, table } from "./dom.js";

const COLUMNS = [["Day"], ["Name"], ["Step", true], ["Scores", true], ["Mean", true]];
const DROPPED = "dropped: ";
const NUM_SHOWN = 8, NUM_RELEASES = 4;
const ENDS = { steps: "does not serve yet", canary: "answers some of the users", promoted: "was promoted", rolled_back: "was set aside" };

// A panel, which is empty without scores, and what the charts show of it.
export function learningPanel(route) {
  const node = el("div");
  let report = { info: null, scores: null };
  let isOpen = false; // whether all days are shown, which stays when the panel is new
  const refresh = async () => {
    report = await look(ofModel(route, "learning"));
    refill(node, ...(report.info || report.scores ? [section(report, isOpen, (open) => { isOpen = open; })] : []));
  };
  // Vertical lines of a chart by step: the releases.
  const marks = () => (report.scores?.releases ?? []).filter(({ state }) => state !== "steps")
    .map(({ state, step }) => ({ x: step, dash: state === "promoted" ? "solid" : "dot" }));
  // The mean of each name's scores by step, as the lines of a chart.
  const lines = (steps) => [...new Set((report.scores?.days ?? []).map(({ name }) => name))].map((name) => {
    const of = report.scores.days.filter((day) => day.name === name);
    return { label: name, x: steps, steps, y: steps.map((step) => mean(of.filter((day) => day.step === step))) };
  }).filter(({ y }) => y.some((value) => value !== null));
  return { node, refresh, marks, lines, isLive: () => report.info !== null };
}

function mean(rows) {
  const count = rows.reduce((sum, day) => sum + day.number, 0);
  return count ? rows.reduce((sum, day) => sum + day.number * day.mean, 0) / count : null;
}

function section({ info, scores }, isOpen, onopen) {
  const state = info?.state ?? "off", release = info?.release;
  const reason = info?.reason ?? "Learning is off. `art learn` turns it on.";
  return el("section", { class: "panel", "aria-labelledby": "learning" },
    el("h2", { id: "learning" }, "Learning from scores ", el("b", { class: `badge ${{ on: "good", paused: "bad" }[state] ?? ""}` }, state)),
    el("p", { class: state === "paused" && "bad" }, prose(reason)),
    release?.reason && el("p", { class: "muted" }, "Newest decision: ", prose(release.reason)),
    el("dl", { class: "facts" }, facts(info, scores).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    release?.arms.length > 0 && canary(release),
    scores && releases(scores.releases),
    scores && days(scores.days, isOpen, onopen));
}

function facts(info, scores) {
  const counts = info?.counts ?? {}, dropped = Object.entries(counts).filter(([name]) => name.startsWith(DROPPED));
  const reasons = dropped.map(([name, count]) => `${dropped.length > 1 ? `${short(count)} ` : ""}${name.slice(DROPPED.length)}`);
  const { answers, delay } = scores ?? {};
  return [
    ["Serving step", info && number(info.serving_step)],
    ["Waiting", info && [number(counts.scored ?? 0), el("span", { class: "muted" }, ` for a batch of ${short(info.policy.batch)}`)]],
    ["Trained", counts.trained > 0 && number(counts.trained)],
    ["Dropped", counts.dropped > 0 && [number(counts.dropped), el("span", { class: "muted" }, ` ${reasons.join(", ")}`)]],
    ["Scored answers", answers?.number > 0 && [`${Math.round((100 * answers.scored) / answers.number)}%`, el("span", { class: "muted" }, ` of the newest ${short(answers.number)}`)]],
    ["Delay of scores", delay && [duration(delay.p50), el("span", { class: "muted" }, " median, 95% within "), duration(delay.p95)]],
  ].filter(([, value]) => value);
}

// The mean rewards of the two steps as lines, and their intervals as bars.
function canary({ arms, z, candidate }) {
  const ends = arms.flatMap((arm) => arm.interval ?? [arm.mean ?? 0]);
  const low = Math.min(0, ...ends), high = Math.max(1, ...ends);
  const at = (value) => `${((value - low) / (high - low)) * 100}%`;
  return el("div", {}, el("h3", {}, "Canary", z !== null && el("span", { class: "muted" }, `, difference ${short(z)} standard errors`)),
    el("p", { class: "note" }, `Mean rewards with their 95% intervals. The bars begin at ${short(low)} and end at ${short(high)}.`),
    el("ul", { class: "rates" }, arms.map((arm) => {
      const bar = el("span", { class: "fill" }), line = el("span", { class: "mean" });
      if (arm.interval) [bar.style.left, bar.style.width] = [at(arm.interval[0]), `${((arm.interval[1] - arm.interval[0]) / (high - low)) * 100}%`];
      if (arm.mean !== null) line.style.left = at(arm.mean);
      return el("li", {}, el("span", {}, `step ${short(arm.step)}`, el("span", { class: "muted" }, arm.step === candidate ? " canary" : " serves")),
        el("span", {}, number(arm.mean), arm.interval && el("span", { class: "muted" }, ` ${arm.interval.map((end) => end.toFixed(3)).join(" to ")}`)),
        el("span", { class: "muted" }, `${plural(arm.scored, "score")} of ${plural(arm.users, "user")}`),
        el("span", { class: "track" }, bar, arm.mean !== null && line));
    })));
}

function releases(all) {
  const item = (release) => el("li", { class: release.state === "rolled_back" && "bad" }, el("b", {}, `step ${short(release.step)}`),
    ` ${ENDS[release.state]}, `, ago(release.ended_at ?? release.began_at), release.reason && [": ", prose(release.reason)]);
  return all.length > 0 && el("div", {}, el("h3", {}, "Releases"), el("ul", { class: "notes" }, all.slice(0, NUM_RELEASES).map(item)));
}

function days(all, isOpen, onopen) {
  const rows = [...all].sort((a, b) => b.day - a.day || b.step - a.step || a.name.localeCompare(b.name));
  const shown = (part) => table("Scores a day", COLUMNS, part.map((day) => row(COLUMNS, [
    new Date(day.day * 86_400_000).toISOString().slice(0, 10), day.name, number(day.step), number(day.number), number(day.mean),
  ])));
  return rows.length > 0 && el("div", {}, el("h3", { class: "below" }, "Scores a day"), shown(rows.slice(0, NUM_SHOWN)),
    rows.length > NUM_SHOWN && el("details", { open: isOpen, ontoggle: (event) => onopen(event.target.open) },
      el("summary", {}, plural(rows.length - NUM_SHOWN, "older row")), shown(rows.slice(NUM_SHOWN))));
}

// The scores of a rollout, and who gave them.
export function scoreList(scores) {
  const item = (score) => el("li", {}, el("b", {}, score.name, " "), number(score.value),
    score.user && [" by ", el("code", { title: "the beginning of the user's hash" }, score.user)],
    `, ${score.reason ? `${score.state}: ${score.reason}` : score.state}${score.trained_step === null ? "" : ` step ${short(score.trained_step)}`}, `,
    ago(score.created_at), score.target.startsWith("session ") && `, of ${score.target}`, score.comment && `: ${score.comment}`);
  return scores?.length > 0 && el("section", { class: "panel", "aria-labelledby": "scores" },
    el("h2", { id: "scores" }, "Scores"), el("ul", { class: "notes" }, scores.map(item)));
}
