// The queue of a running server: what runs, what waits and for what, what has ended.

import { cancelJob, get, look } from "./api.js";
import { ago, button, duration, el, empty, link, number, plural, prose, refill, row, table } from "./dom.js";

const COLUMNS = [["Run"], ["Actions"], ["Step", true], ["Trained tokens", true], ["Accepted"], ["Duration", true]];
const REFRESH_SECONDS = 2;
const MAX_ENDED = 50;

export async function jobs() {
  const list = el("div"), said = el("p", { role: "status" });
  let asked = null; // the job whose cancellation has to be confirmed
  const opened = new Set(); // jobs whose notes are shown
  let found = { live: null }, ended = [];

  const refresh = async () => {
    found = await look(["overview"]);
    if (found.live) ended = (await get(["jobs"], [["state", "done,failed,cancelled"], ["limit", MAX_ENDED]])).jobs;
    show();
  };
  const show = () => {
    if (!found.live) return refill(list, empty("No server runs here.", "These are finished runs; their jobs are not on disk."));
    const part = (title, items, columns) => [el("h2", {}, title), items.length ? table(title, columns, items.map((job) => rowOf(job, columns))) : el("p", { class: "muted" }, "None.")];
    refill(list, ...part("Queue", found.live.jobs, COLUMNS), ...part("Ended", ended, COLUMNS.filter(([name]) => name !== "Actions")));
  };
  const cancel = async (job) => {
    asked = null;
    said.textContent = "Cancelling…";
    try {
      await cancelJob(job.job_id);
      said.textContent = `The job of ${job.project}/${job.name} is cancelled.`;
    } catch (error) {
      said.textContent = error.message;
    }
    await refresh();
  };
  const ask = (id, focus) => {
    asked = id;
    show();
    document.getElementById(focus)?.focus();
  };
  const actions = (job) => {
    const id = job.job_id;
    if (asked !== id) return button("Cancel", () => ask(id, `no-${id}`), { id: `cancel-${id}`, "aria-label": `Cancel the job of ${job.project}/${job.name}` });
    return el("span", { class: "group", role: "group", "aria-label": "Cancel this job?" }, "Cancel this job?",
      button("Yes, cancel it", () => cancel(job), { id: `yes-${id}`, class: "danger" }), button("No", () => ask(null, `cancel-${id}`), { id: `no-${id}` }));
  };
  const rowOf = (job, columns) => row(columns, [
    el("div", {}, link(["run", job.project, job.name], `${job.project}/${job.name}`), el("b", { class: `badge state-${job.state}` }, job.state), el("div", { class: "detail" }, progress(job), notesOf(job))),
    ...(columns === COLUMNS ? [actions(job)] : []),
    job.step === null ? "–" : link(["run", job.project, job.name, "rollouts", "train", job.step], number(job.step)),
    number(job.report.num_trained_tokens), ago(job.created_at), duration((job.finished_at ?? found.time) - job.created_at),
  ], { "data-job": job.job_id });
  const notesOf = (job) => {
    const left = job.report.dropped.map((each) => `${plural(each.count, each.unit)} left out: ${each.reason}`);
    const notes = [...left, ...job.report.notes];
    return notes.length > 0 && el("details", { open: opened.has(job.job_id), ontoggle: (event) => opened[event.target.open ? "add" : "delete"](job.job_id) },
      el("summary", {}, plural(notes.length, "note")), el("ul", { class: "notes" }, notes.map((note) => el("li", {}, prose(note)))));
  };
  const progress = (job) => {
    if (job.waits_for) return prose(`waits for ${job.waits_for}`);
    if (job.error && job.state !== "running") return el("span", { class: "bad" }, prose(job.error.message));
    if (job.state !== "running") return plural(job.report.num_groups_trained, "group");
    const bar = job.total ? el("progress", { max: job.total, value: job.completed ?? 0, "aria-label": "Progress" }) : null;
    return el("span", { class: "line" }, job.phase, bar, job.total ? `${job.completed ?? 0} of ${job.total}` : null);
  };
  await refresh();
  return {
    title: "Jobs", node: el("div", {}, el("h1", { tabindex: -1 }, "Jobs"), said, list), up: "#/",
    watch: (marks) => marks.jobs, refresh, every: REFRESH_SECONDS,
  };
}
