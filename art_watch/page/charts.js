// Small charts of metrics by step. Captions have the numbers of the chosen step; the pointer over one chart chooses the
// step of all. plotly draws, and is loaded with the first chart. Its texts are HTML, so names stay in our captions.

import { rangeOf, segments, smoothed, ticks, withGaps } from "./axes.js";
import { align, button, el, keepSettings, number, select, short } from "./dom.js";

const SMOOTHINGS = [["", "none"], ["5", "5 steps"], ["20", "20 steps"], ["100", "100 steps"]];
const HEIGHT = 170, DIGIT_PIXELS = 7; // of a label in 11 px
const PICTURE = { width: 1000, height: 480 };
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
const MAX_MARKERS = 100;
const DASHES = ["solid", "5px,2px", "2px,2px", "8px,3px", "8px,2px,2px,2px", "12px,3px"];
const NUM_COLOURS = 6;
let loading = null;

function loadPlotly() {
  loading ??= new Promise((resolve, reject) => {
    const onerror = () => { loading = null; reject(new Error("The chart library did not load: pip install plotly, and load the page again.")); };
    document.head.append(el("script", { src: "page/plotly.min.js", onload: () => resolve(globalThis.Plotly), onerror }));
  });
  return loading;
}

// The colour that a variable of the style sheet has in the current theme.
function colour(name) {
  const probe = document.body.appendChild(el("i"));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function save(name, url) {
  el("a", { href: url, download: name }).click();
}

const fileName = (title) => title.replace(/[^\w.-]+/g, "-");

// Charts that show the same step, with one zoom, smoothing and scale, which the address of the page keeps. `onstep(x)` is
// called when the pointer chooses a step; null: it has left, or the charts show another part.
export class Board {
  constructor(route, onstep = () => {}) {
    this.route = route;
    this.charts = [];
    this.onstep = onstep;
    this.seen = new IntersectionObserver((entries) => this.drawSeen(entries), { rootMargin: "200px" });
    this.redraw = () => this.charts.forEach((chart) => chart.isDrawn && chart.draw());
    document.addEventListener("theme", this.redraw);
  }

  // One chart after the other, so that the first is soon there.
  async drawSeen(entries) {
    for (const entry of entries.filter((each) => each.isIntersecting)) {
      const chart = this.charts.find((each) => each.plot === entry.target);
      if (!chart || chart.isDrawn) continue;
      await chart.draw();
      await new Promise(requestAnimationFrame);
    }
  }

  // Draws all charts anew with these settings.
  set(changes) {
    keepSettings(this.route, changes);
    this.redraw();
    this.onstep(null);
  }

  // The part of the axis that is shown, as far as it was chosen.
  shown() {
    const { from, to } = this.route.settings;
    return [from ? Number(from) : -Infinity, to ? Number(to) : Infinity];
  }

  // The fields that set how all charts are drawn, with the name of their axis.
  tools(axis = "step") {
    const { settings } = this.route;
    this.ends = ["from", "to"].map((name) => el("input", {
      type: "number", id: `zoom-${name}`, step: "any", value: settings[name] ?? "", onchange: (event) => this.set({ [name]: event.target.value }),
    }));
    return el("div", { class: "tools" },
      select("Smoothing", SMOOTHINGS, settings.smooth ?? "", (smooth) => this.set({ smooth }), { id: "smoothing" }),
      el("label", { class: "field" }, el("input", { type: "checkbox", id: "log-axis", checked: settings.log === "1", onchange: (event) => this.set({ log: event.target.checked ? "1" : "" }) }), "log axis"),
      el("label", { class: "field" }, `From ${axis}`, this.ends[0]), el("label", { class: "field" }, "to", this.ends[1]),
      button("All", () => this.zoom(null), { "aria-label": "Show the whole axis", id: "zoom-out" }),
      el("span", { class: "muted fine" }, "or drag over a chart; a double click shows all"));
  }

  // Shows this part of the axis in all charts; null: all of it.
  zoom(range) {
    const [from, to] = range ?? ["", ""];
    this.ends?.forEach((field, place) => { field.value = [from, to][place]; });
    this.set({ from, to });
  }

  add(chart) {
    chart.board = this;
    this.charts.push(chart);
    this.seen.observe(chart.plot);
    return chart;
  }

  remove(chart) {
    this.charts = this.charts.filter((each) => each !== chart);
    chart.close();
  }

  // Shows the numbers at x in all captions; with a pointer also the line at x in all other charts.
  point(x, source = null) {
    for (const chart of this.charts) {
      chart.read(x);
      if (source && chart !== source && chart.isDrawn) globalThis.Plotly.Fx.hover(chart.plot, { xval: x }, ["xy"]);
    }
  }

  leave() {
    for (const chart of this.charts) if (chart.isDrawn) globalThis.Plotly.Fx.unhover(chart.plot, {}, "xy");
  }

  close() {
    document.removeEventListener("theme", this.redraw);
    this.seen.disconnect();
    this.charts.forEach((chart) => chart.close());
  }
}

// A chart of lines [{label, x, y, steps}]. Options: title, note, axis (what x is), kind of its values (`axes.js`), isLog,
// isStacked, extra (elements in the caption), at (x as text).
export class Chart {
  constructor(options) {
    this.options = options;
    this.lines = [];
    this.marks = []; // vertical lines [{x, dash}]
    this.plot = el("div", { class: "plot", "aria-hidden": "true" }); // the caption has the numbers
    this.legend = el("ul", { class: "legend" });
    this.note = el("p", { class: "note" }, options.note);
    this.node = el("figure", { class: "panel chart" },
      el("figcaption", {}, el("h3", {}, options.title, el("span", { class: "group" }, options.extra,
        button("PNG", () => this.savePicture(), { class: "small plain", "aria-label": `PNG of ${options.title}` }),
        button("CSV", () => this.saveTable(), { class: "small plain", "aria-label": `CSV of ${options.title}` }))), this.legend),
      this.plot, this.note);
  }

  set(lines) {
    const { options } = this;
    this.lines = lines;
    this.legend.replaceChildren(...lines.map((line, place) => {
      line.value = el("span", { class: "value" });
      const mark = el("span", { class: options.isStacked ? "mark area" : `mark dash-${place % DASHES.length}` });
      mark.style.setProperty("--mark", `var(--line-${place % NUM_COLOURS})`);
      return el("li", {}, mark, line.label, " ", line.value);
    }));
    if (this.isDrawn) this.draw();
  }

  // Shows the values at x, of a line without this x the ones before; null: the newest ones. Values of another x say so.
  read(x) {
    const [, to] = this.board.shown(), at = this.options.at ?? ((step) => `step ${short(step)}`);
    const isThere = (each) => each !== null && each <= (x ?? to);
    const last = x ?? Math.max(...this.lines.map((line) => line.x.findLast(isThere) ?? -Infinity));
    for (const line of this.lines) {
      let place = x === null ? -1 : line.x.indexOf(x);
      if (place < 0) place = line.x.findLastIndex((each, row) => isThere(each) && (x !== null || (line.y[row] ?? null) !== null));
      const isElsewhere = place >= 0 && line.x[place] !== last;
      line.value.replaceChildren(number(line.y[place]), isElsewhere ? el("span", { class: "muted" }, ` (${at(line.x[place])})`) : "");
    }
    if (!this.options.isLog) align(this.lines.flatMap(({ value }) => [...value.querySelectorAll(".number")]));
  }

  async draw() {
    this.isDrawn = true;
    try {
      const plotly = await loadPlotly();
      if (this.isClosed) return;
      const isFirst = !this.plot.classList.contains("js-plotly-plot");
      await plotly.react(this.plot, this.traces(), this.layout(), { displayModeBar: false, responsive: true, doubleClick: false });
      if (!isFirst) return;
      this.plot.on("plotly_hover", ({ event, points }) => {
        if (!event) return; // our own call
        this.board.point(points[0].x, this);
        this.board.onstep(points[0].x);
      });
      this.plot.on("plotly_relayout", (changes) => {
        const [from, to] = [changes["xaxis.range[0]"], changes["xaxis.range[1]"]];
        if (from !== undefined) this.board.zoom([from, to].map((each) => Number(each.toPrecision(4))));
      });
      this.plot.on("plotly_doubleclick", () => this.board.zoom(null));
      this.plot.on("plotly_unhover", ({ event }) => {
        if (!event) return;
        this.board.leave();
        this.board.onstep(null);
      });
    } catch (error) {
      this.plot.replaceChildren(el("p", { class: "empty" }, error.message));
    }
  }

  traces() {
    const traces = this.options.isStacked ? this.areas() : this.lines.flatMap((line, place) => this.curves(line, place));
    return traces.map((trace) => ({ type: "scatter", hoverinfo: "none", showlegend: false, cliponaxis: false, ...trace }));
  }

  // A line with gaps where values are missing. Points between gaps are dots. Under a smoothed line the values are thin.
  curves(line, place) {
    const shown = colour(`--line-${place % NUM_COLOURS}`), dash = DASHES[place % DASHES.length];
    const { x, y, alone, isSparse } = withGaps(line);
    const span = Number(this.board.route.settings.smooth ?? 0);
    const hasDots = (isSparse || alone.length > 0) && x.length <= MAX_MARKERS;
    const own = { x, y, mode: hasDots ? "lines+markers" : "lines", marker: { size: 4, color: shown }, line: { color: shown, width: 1.6, dash } };
    const dots = { x: alone.map(([at]) => at), y: alone.map(([, value]) => value), mode: "markers", marker: { size: 4, color: shown } };
    const curves = span ? [{ ...own, y: smoothed(y, span) }, { ...own, opacity: 0.4, mode: "lines", line: { color: shown, width: 0.7 } }] : [own];
    return alone.length && !hasDots ? [...curves, dots] : curves;
  }

  // Smoothed, because thousands of jagged areas cover each other.
  areas() {
    const span = Number(this.board.route.settings.smooth ?? 0);
    const heights = this.lines.map(({ y }) => (span ? smoothed(y, span) : y));
    return segments(this.lines).flatMap((rows, number) => this.lines.map((line, place) => ({
      x: rows.map((row) => line.x[row]), y: rows.map((row) => heights[place][row] ?? 0), mode: rows.length > 1 ? "lines" : "lines+markers",
      stackgroup: `rows ${number}`, marker: { size: 4 }, line: { color: colour(`--line-${place % NUM_COLOURS}`), width: 0.5 },
    })));
  }

  // The whole horizontal axis, or the part that is shown.
  span() {
    const xs = this.lines.flatMap(({ x }) => x).filter((x) => typeof x === "number");
    const [low, high] = xs.length ? xs.reduce(([least, most], x) => [Math.min(least, x), Math.max(most, x)], [xs[0], xs[0]]) : [0, 1];
    const [from, to] = this.board.shown();
    const ends = [Number.isFinite(from) ? from : low, Number.isFinite(to) ? to : high];
    return ends[0] < ends[1] ? ends : low < high ? [low, high] : [low - 1, high + 1];
  }

  layout() {
    const [first, last] = this.span();
    const wantsLog = this.options.isLog || (this.board.route.settings.log === "1" && !this.options.isStacked);
    const vertical = rangeOf(this.valuesIn(first, last), this.options.kind, wantsLog);
    this.note.textContent = [this.options.note, vertical.isCut && "Values of 0 or less are not drawn."].filter(Boolean).join(" ");
    const isWhole = this.lines.every(({ x }) => x.every((each) => each === null || Number.isInteger(each)));
    const across = ticks(first, last, 5, isWhole), up = vertical.ticks;
    const axis = {
      gridcolor: colour("--border"), linecolor: colour("--border"), zeroline: false, tickfont: { size: 11 }, tickmode: "array",
      showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "solid", spikecolor: colour("--muted"), spikesnap: "hovered data",
    };
    const room = (labels) => DIGIT_PIXELS * Math.max(1, ...labels.map((label) => label.length));
    return {
      height: this.options.height ?? HEIGHT, margin: { l: 12 + room(up.labels), r: 8 + room(across.labels) / 2, t: 8, b: 26 },
      paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { family: "system-ui, sans-serif", color: colour("--muted") }, hovermode: "x", hoverdistance: -1,
      shapes: this.marks.map(({ x, dash }) => ({
        type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, layer: "below", line: { color: colour("--muted"), width: 1, dash },
      })),
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: { ...axis, showgrid: false, range: [first, last], tickvals: across.values, ticktext: across.labels },
      yaxis: {
        ...axis, showspikes: false, fixedrange: true, range: vertical.range, tickvals: up.values, ticktext: up.labels, type: vertical.isLog ? "log" : "linear",
      },
    };
  }

  // The values whose x is between two; of a stack the sums.
  valuesIn(first, last) {
    if (!this.options.isStacked) return this.lines.flatMap(({ x, y }) => y.filter((value, place) => value !== null && x[place] >= first && x[place] <= last));
    return segments(this.lines).flat().map((row) => this.lines.reduce((sum, { y }) => sum + (y[row] ?? 0), 0)).concat(0);
  }

  async savePicture() {
    const plotly = await loadPlotly();
    const names = this.lines.map(({ label }) => String(label.textContent ?? label).replace(/[&<>]/g, (each) => ENTITIES[each]));
    const traces = this.traces();
    const title = { text: this.options.title.replace(/[&<>]/g, (each) => ENTITIES[each]), font: { size: 16, color: colour("--text") } };
    const legend = names.map((name, place) => ({
      x: [null], y: [null], type: "scatter", mode: "lines", name, showlegend: true,
      line: { color: colour(`--line-${place % NUM_COLOURS}`), dash: DASHES[place % DASHES.length] },
    }));
    const layout = {
      ...this.layout(), ...PICTURE, title, paper_bgcolor: colour("--panel"), plot_bgcolor: colour("--panel"), showlegend: true,
      legend: { orientation: "h", y: -0.12, font: { size: 12 } },
    };
    layout.margin = { ...layout.margin, t: 48, b: 48 };
    save(`${fileName(this.options.title)}.png`, await plotly.toImage({ data: [...traces, ...legend], layout }, { format: "png", ...PICTURE, scale: 2 }));
  }

  saveTable() {
    const rows = new Map(); // by x, the values of the lines
    this.lines.forEach(({ x, y }, place) => x.forEach((at, row) => {
      if (y[row] === null || at === null) return;
      if (!rows.has(at)) rows.set(at, this.lines.map(() => ""));
      rows.get(at)[place] = y[row];
    }));
    const quoted = (text) => `"${String(text).replaceAll('"', '""')}"`;
    const head = [this.options.axis ?? "step", ...this.lines.map(({ label }) => label.textContent ?? label)].map(quoted);
    const body = [...rows].sort(([a], [b]) => a - b).map(([at, values]) => [at, ...values].join(","));
    const url = URL.createObjectURL(new Blob([[head.join(","), ...body, ""].join("\n")], { type: "text/csv" }));
    save(`${fileName(this.options.title)}.csv`, url);
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }

  close() {
    this.isClosed = true;
    if (globalThis.Plotly && this.isDrawn) globalThis.Plotly.purge(this.plot);
    this.node.remove();
  }
}
