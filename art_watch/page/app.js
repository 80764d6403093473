// Opens the page that the address names, keeps it up to date, and has what all pages share: the status of the
// connection, the key, the theme, and the keyboard.
//
// A page is a function of a route that returns {title, node} and, where it has them: `up`, the address that Escape
// leads to; `watch(marks)`, the part of the server's marks that it depends on; `refresh()`, which shows new data in
// place; `every`, the seconds between two refreshes; `close()`.

import { ApiError, Changes, setKey } from "./api.js";
import { checkpoints } from "./checkpoints.js";
import { compare } from "./compare.js";
import { el, empty, hashOf, prose, renewTimes } from "./dom.js";
import { groups } from "./groups.js";
import { jobs } from "./jobs.js";
import { overview } from "./overview.js";
import { rollout } from "./rollout.js";
import { charts } from "./run.js";
import { server } from "./server.js";
import { tree } from "./tree.js";

const PAGES = { "": overview, compare, jobs, server };
const RUN_PAGES = { charts, rollouts: groups, rollout, tree, checkpoints };
const REST_MS = 200; // between two refreshes
const FIRST_MARKS_MS = 1000; // a page that is read before the first marks is read again with them
const TIMES_MS = 5000; // between two looks at the clock

const main = document.getElementById("main");
const status = document.getElementById("status");
const keyForm = document.getElementById("key-form");
const tip = document.getElementById("tip");
const scrolls = new Map();
let page = null, marks = null, address = "", opening = 0, timer = null;
let connected = Promise.withResolvers();
let isRefreshing = false, isStale = false;
let connection = ["", false]; // what the status says unless a request has failed

function readRoute() {
  const hash = location.hash.replace(/^#\/?/, "");
  const [path] = hash.split("?", 1);
  const settings = Object.fromEntries(new URLSearchParams(hash.slice(path.length)));
  try {
    const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
    return { parts, settings, project: parts[1], name: parts[2] };
  } catch {
    return { parts: ["unreadable"], settings };
  }
}

function pageOf({ parts }) {
  const [first = "", , name, section = "charts"] = parts;
  const pages = first === "run" && name ? RUN_PAGES : PAGES;
  const key = first === "run" ? section : first;
  return Object.hasOwn(pages, key) ? pages[key] : unknown;
}

function unknown() {
  return { title: "No such page", up: "#/", node: empty("There is no page at this address.", "Begin with Runs.") };
}

function failed(error, { parts }) {
  const up = parts[0] === "run" && parts[3] ? hashOf(parts.slice(0, 3)) : "#/";
  const node = el("div", { class: "empty", role: "alert" }, el("h1", { tabindex: -1 }, "This cannot be shown"), el("p", {}, prose(error.message)), el("p", {}, el("a", { href: up }, "Back")));
  return { title: "Error", up, node, isFailed: true };
}

async function open() {
  const number = ++opening, route = readRoute(), held = document.activeElement?.id;
  scrolls.set(address, scrollY);
  main.setAttribute("aria-busy", "true");
  if (!marks) await Promise.race([connected.promise, new Promise((resolve) => setTimeout(resolve, FIRST_MARKS_MS))]);
  const known = marks;
  let next;
  try {
    next = await pageOf(route)(route);
  } catch (error) {
    if (!("status" in error)) console.error(error);
    askForKey(error);
    next = failed(error, route);
  }
  if (number !== opening) return next.close?.();
  page?.close?.();
  clearInterval(timer);
  page = next;
  address = location.hash;
  page.mark = known && markOf(known);
  document.title = `${page.title} – ART`;
  tip.hidden = true;
  main.replaceChildren(page.node);
  main.removeAttribute("aria-busy");
  for (const each of document.querySelectorAll("header nav a")) {
    const isHere = (each.getAttribute("href").slice(2) || "") === (PAGES[route.parts[0]] ? route.parts[0] : "");
    if (isHere) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  scrollTo(0, scrolls.get(address) ?? 0);
  if (!document.activeElement || document.activeElement === document.body) {
    const target = (held && main.querySelector(`#${CSS.escape(held)}`)) || main.querySelector("h1");
    target?.focus({ preventScroll: true });
  }
  if (page.every) timer = setInterval(() => !document.hidden && refresh(), page.every * 1000);
  if (!page.isFailed) say(...connection);
  if (marks && marks !== known) onmarks(marks); // they came while the page was read
}

const markOf = (found) => JSON.stringify(page.watch?.(found) ?? null);

async function refresh() {
  if (!page?.refresh) return;
  isStale = isRefreshing;
  if (isRefreshing) return;
  isRefreshing = true;
  const shown = page;
  try {
    await shown.refresh();
    say(...connection);
  } catch (error) {
    askForKey(error);
    if (page === shown) say(error.message, true);
  }
  await new Promise((resolve) => setTimeout(resolve, REST_MS));
  isRefreshing = false;
  if (isStale) refresh();
}

function onmarks(found) {
  marks = found;
  connected.resolve();
  document.getElementById("jobs-link").hidden = !found.jobs;
  if (!page) return;
  const mark = markOf(found), before = page.mark;
  page.mark = mark;
  if (page.isFailed && !keyForm.hidden) return;
  if (page.isFailed) open();
  else if (before !== mark) refresh();
}

function onstate(error, seconds) {
  if (error) connected.resolve();
  if (error && !seconds) return askForKey(error);
  connection = error ? [`${error.message} Next try in ${seconds} s.`, true] : ["Connected", false];
  say(...connection);
}

function say(text, isBad) {
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", isBad);
}

function askForKey(error) {
  if (error.status !== 401 && error.status !== 403) return;
  keyForm.hidden = false;
  say(error.status === 401 ? "The server needs an API key." : error.message, true);
}

const changes = new Changes(onmarks, onstate);

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(document.getElementById("key").value.trim());
  keyForm.reset();
  keyForm.hidden = true;
  marks = null;
  connected = Promise.withResolvers();
  changes.start();
  open();
});

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.style.colorScheme ? root.style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.style.colorScheme = isDark ? "light" : "dark";
  localStorage.setItem("art-theme", root.style.colorScheme);
  document.dispatchEvent(new Event("theme"));
});

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const isField = event.target.matches("input:not([type=checkbox]), select, textarea");
  if (event.key === "Escape") {
    if (!tip.hidden) tip.hidden = true;
    else if (isField) event.target.blur();
    else if (page?.up) location.hash = page.up;
  } else if (!isField) {
    const name = `${event.shiftKey ? "Shift+" : ""}${event.key}`;
    const target = main.querySelector(`[aria-keyshortcuts="${CSS.escape(name)}"]`);
    if (!target) return;
    event.preventDefault();
    target.click();
  }
});

// A request that one of a page's controls made. Faults of the page's own go to the console.
addEventListener("unhandledrejection", (event) => {
  if (!(event.reason instanceof ApiError)) return;
  event.preventDefault();
  say(event.reason.message, true);
  askForKey(event.reason);
});

addEventListener("hashchange", open);
setInterval(() => renewTimes(main), TIMES_MS);
changes.start();
if (!location.hash) history.replaceState(null, "", hashOf([]));
open();
