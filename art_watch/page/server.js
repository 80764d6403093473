// The health of a running server, its memory, and the ends of its logs.

import { look } from "./api.js";
import { bytes, el, keepSettings, number, plural, prose, refill, select } from "./dom.js";
import { activityBar } from "./overview.js";

const REFRESH_SECONDS = 5;

export async function server(route) {
  const { settings } = route;
  const replicas = (await look(["overview"])).live?.health.replicas ?? [];
  const logs = ["server", ...(replicas.length ? replicas.map(({ name }) => name) : ["engine"]), "trainer"];
  const state = el("div"), log = el("pre", { class: "log", tabindex: 0, role: "region", "aria-label": "Log" });
  const readLog = async () => {
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    try {
      const { text } = await look(["logs", settings.log ?? logs[1]], [["lines", settings.lines ?? 200]]);
      if (text !== log.textContent) log.textContent = text || "The log is empty.";
    } catch (error) {
      if (error.status !== 403) throw error;
      log.textContent = error.message; // a key for some projects
    }
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  };
  const refresh = async () => {
    const [{ live }] = await Promise.all([look(["overview"]), readLog()]);
    refill(state, ...(live ? [activityBar(live), health(live)] : [el("p", { class: "muted" }, "No server runs here: these are finished runs. Its logs may be on disk.")]));
  };
  const set = async (changes) => { keepSettings(route, changes); await readLog(); };
  await refresh();
  const node = el("div", {}, el("h1", { tabindex: -1 }, "Server"), state, el("section", { "aria-labelledby": "logs" }, el("h2", { id: "logs" }, "Logs"),
    el("div", { class: "tools" }, select("Log", logs, settings.log ?? logs[1], (value) => set({ log: value }), { id: "log" }),
      select("Lines", [50, 200, 1000, 2000], settings.lines ?? 200, (value) => set({ lines: value }), { id: "lines" })), log));
  requestAnimationFrame(() => { log.scrollTop = log.scrollHeight; });
  return { title: "Server", node, up: "#/", watch: (marks) => [marks.engine, marks.replicas], refresh, every: REFRESH_SECONDS };
}

const badge = (state) => el("b", { class: `badge ${state === "ready" ? "good" : state === "failed" ? "bad" : ""}` }, state);

function health({ health: found, machine }) {
  const faults = Object.entries(found.faults);
  const facts = [
    ["Engine", badge(found.engine)],
    ...found.replicas.map((replica) => [replica.name, el("span", {}, badge(replica.engine), ` ${plural(replica.num_requests, "request")}, ${plural(replica.num_starts, "start")}`, replica.detail && prose(` ${replica.detail}`))]),
    ["Base model", found.base_model ?? "none"], ["Version", found.version], ["Detail", found.detail && prose(found.detail)], ["Requests wait for", found.waits_for && prose(found.waits_for)],
    ["Longest stall of the server", el("span", {}, number(found.longest_stall_seconds), " s")],
    ...Object.entries(machine?.resident_bytes ?? {}).map(([name, size]) => [`Memory, ${name}`, bytes(size)]),
    ["Free disk space", machine && bytes(machine.disk_free_bytes)],
  ].filter(([, value]) => value !== null && value !== undefined);
  return el("section", { class: "panel", "aria-labelledby": "health" }, el("h2", { id: "health" }, "Health"),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    faults.length ? el("ul", { class: "faults" }, faults.map(([part, error]) => el("li", { class: "bad" }, el("b", {}, `${part}:`), prose(` ${error}`)))) : el("p", {}, "No faults."));
}
