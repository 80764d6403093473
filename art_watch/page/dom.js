// Elements and the forms in which values are shown. Text enters the page only as text nodes and attribute values.

export function el(tag, attributes = {}, ...children) {
  const node = tag === "svg" || tag === "path"
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// A sentence of the server or of a program. What stands between backticks is code.
export function prose(text) {
  return text.split(/`([^`\n]+)`/).map((part, place) => (place % 2 ? el("code", {}, part) : part));
}

// The hash of a page: its parts, then its settings. Empty settings are left out.
export function hashOf(parts, settings = {}) {
  const kept = Object.entries(settings).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = kept.map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(value)}`).join("&");
  return `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

// Keeps settings in the address without a new entry in the browser's history.
export function keepSettings(route, changes) {
  Object.assign(route.settings, changes);
  history.replaceState(null, "", hashOf(route.parts, route.settings));
}

export function link(parts, text, attributes = {}, settings = {}) {
  return el("a", { href: hashOf(parts, settings), ...attributes }, text);
}

export function button(text, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, text);
}

// A choice of [value, label] pairs, or of values.
export function select(label, choices, chosen, onchoose, attributes = {}) {
  const options = choices.map((each) => {
    const [value, text] = Array.isArray(each) ? each : [each, each];
    return el("option", { value, selected: String(value) === String(chosen) }, text);
  });
  const list = el("select", { ...attributes, onchange: (event) => onchoose(event.target.value) }, options);
  return el("label", { class: "field" }, label, list);
}

const DIGITS = 4;

// Up to four significant digits; the title has the number in full.
export function number(value, attributes = {}) {
  if (value === null || value === undefined) return el("span", { class: "muted" }, "–");
  return el("span", { class: "number", title: String(value), ...attributes }, short(value));
}

export function short(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value), beside = value - 1;
  if (Math.abs(beside) < 5e-4) return `1 ${beside < 0 ? "−" : "+"} ${Math.abs(beside).toExponential(0)}`;
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(3)).toExponential();
  return value.toLocaleString("en", { maximumSignificantDigits: DIGITS });
}

export function signed(value) {
  return value === null || value === undefined ? "–" : `${value > 0 ? "+" : ""}${short(value)}`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = value > 0 ? Math.min(4, Math.floor(Math.log10(value) / 3)) : 0;
  return el("span", { class: "size", title: `${value} bytes` }, `${Number((value / 1000 ** power).toPrecision(3))} ${units[power]}`);
}

// A time (ISO text, or seconds since 1970) as its distance from now.
export function ago(time) {
  if (!time) return el("span", { class: "muted" }, "–");
  const at = new Date(typeof time === "number" ? time * 1000 : time);
  return el("time", { datetime: at.toISOString(), title: at.toLocaleString() }, distance(at));
}

function distance(at) {
  const seconds = Math.max(0, (Date.now() - at) / 1000);
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([each]) => seconds >= each) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit} ago`;
}

// Seconds in their two largest units.
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !(seconds >= 0)) return el("span", { class: "muted" }, "–");
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const place = units.findIndex(([size]) => seconds >= size);
  const [[size, unit], next] = place < 0 ? [[1, "s"]] : [units[place], units[place + 1]];
  const whole = Math.floor(seconds / size), rest = next ? Math.floor((seconds - whole * size) / next[0]) : 0;
  return el("span", { title: `${seconds} s` }, next && rest ? `${whole} ${unit} ${rest} ${next[1]}` : `${whole || Number(seconds.toFixed(1))} ${unit}`);
}

// The value of a setting as text.
export function setting(value) {
  if (typeof value === "number") return short(value);
  return value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value);
}

// Writes the distances of all times inside a node again.
export function renewTimes(node) {
  for (const each of node.querySelectorAll("time")) {
    const text = distance(new Date(each.dateTime));
    if (each.textContent !== text) each.textContent = text;
  }
}

export function plural(count, noun) {
  return `${short(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function empty(text, hint = null) {
  return el("div", { class: "empty" }, el("p", {}, text), hint && el("p", { class: "muted" }, hint));
}

// A table in a frame that scrolls by itself. A column is [heading, whether it has numbers], which get the same decimals.
export function table(label, columns, rows) {
  columns.forEach(([, isNumber], place) => isNumber && align(rows.map((each) => each.children[place]?.querySelector(".number")).filter(Boolean)));
  const head = columns.map(([name, isNumber]) => el("th", { scope: "col", class: isNumber && "right" }, name));
  return el("div", { class: "scroll", role: "region", "aria-label": label, tabindex: 0 },
    el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}

const FAR = 1000; // numbers that differ more keep their own decimals, or small ones would be 0

// Gives numbers of a column or a caption the same decimals: those that one of them needs, and the largest has within four digits.
export function align(cells) {
  const plain = cells.filter((cell) => /^-?[\d,]+(\.\d+)?$/.test(cell.textContent));
  const sizes = plain.map((cell) => Math.abs(Number(cell.title))).filter((size) => size > 0);
  const largest = Math.max(0, ...sizes);
  if (largest > FAR * Math.min(...sizes)) return;
  const needed = Math.max(0, ...plain.map((cell) => cell.textContent.split(".")[1]?.length ?? 0));
  const decimals = Math.min(needed, Math.max(0, DIGITS - (largest < 1 ? 0 : String(Math.floor(largest)).length)));
  for (const cell of plain) cell.textContent = Number(cell.title).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

// A row whose first cell names it. Cells of columns with numbers are set to the right.
export function row(columns, cells, attributes = {}) {
  return el("tr", attributes, cells.map((cell, place) => place === 0
    ? el("th", { scope: "row" }, cell)
    : el("td", { class: columns[place][1] && "right" }, cell)));
}

const RELEASE_MILLISECONDS = 100;
const delayed = new WeakMap(); // the newest content of an element that is pressed

// Replaces an element's content. Cells of tables stay the same elements if they are equal to the new ones, so that a
// pointer still meets them; what had the focus has it again, found by its id or address. While a pointer or key presses
// something inside, the content waits: the browser sends a click only to what was there when it was pressed.
export function refill(node, ...children) {
  if (node.matches(":active")) {
    if (!delayed.has(node)) setTimeout(refillDelayed, RELEASE_MILLISECONDS, node);
    return void delayed.set(node, children);
  }
  delayed.delete(node);
  const held = node.contains(document.activeElement) ? document.activeElement : null;
  const key = held && (held.id ? `#${CSS.escape(held.id)}` : held.getAttribute("href") && `[href="${CSS.escape(held.getAttribute("href"))}"]`);
  exchange(node, children);
  if (key && document.activeElement !== held) node.querySelector(key)?.focus({ preventScroll: true });
}

const TABLE = ".scroll, table, thead, tbody, tr";

function exchange(node, children) {
  children.forEach((fresh, place) => {
    const old = node.childNodes[place];
    if (!old) node.append(fresh);
    else if (old.matches?.(TABLE) && old.cloneNode().isEqualNode(fresh.cloneNode())) exchange(old, [...fresh.childNodes]);
    else if (!node.matches("tr") || !old.isEqualNode(fresh)) old.replaceWith(fresh);
  });
  while (node.childNodes.length > children.length) node.lastChild.remove();
}

function refillDelayed(node) {
  const children = delayed.get(node);
  if (!delayed.delete(node)) return; // newer content came after the release
  refill(node, ...children);
}

// A line through values; gaps where one is missing.
export function sparkline(values, label) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const low = Math.min(...known), high = Math.max(...known), width = 88, height = 20;
  let pen = "M", path = "";
  values.forEach((value, place) => {
    if (value === null) { pen = "M"; return; }
    const x = (place / (values.length - 1)) * width;
    const y = high > low ? height - 2 - ((value - low) / (high - low)) * (height - 4) : height / 2;
    path += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  });
  return el("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    el("path", { d: path }));
}

// Shows text beside what the pointer or the focus is on. `describe` returns its lines for an element, or null.
export function tips(node, describe) {
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  const show = (event) => {
    const lines = describe(event.target);
    if (!lines) return hide();
    tip.replaceChildren(...lines.map((line) => el("div", {}, line)));
    tip.hidden = false;
    event.target.setAttribute("aria-describedby", "tip");
    const box = event.target.getClientRects()[0], own = tip.getBoundingClientRect();
    const below = box.bottom + own.height + 8 < innerHeight;
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 8))}px`;
    tip.style.top = `${below ? box.bottom + 4 : Math.max(4, box.top - own.height - 4)}px`;
  };
  for (const name of ["pointerover", "focusin"]) node.addEventListener(name, show);
  for (const name of ["pointerleave", "focusout"]) node.addEventListener(name, hide);
}
