// Small charts of metrics by step. Captions have the numbers of the chosen step; the pointer over one chart chooses the
// step of all. plotly draws, and is loaded with the first chart. Its texts are HTML, so names stay in our captions.

import { el, number } from "./dom.js";

const HEIGHT = 170;
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

// Charts that show the same step. `onstep(x)` is called when the pointer chooses one; null: it has left.
export class Board {
  constructor(onstep = () => {}) {
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

// A chart of lines [{label, x, y}]. Options: title, note, isLog, isStacked, extra (elements in the caption).
export class Chart {
  constructor(options) {
    this.options = options;
    this.lines = [];
    this.plot = el("div", { class: "plot", "aria-hidden": "true" }); // the caption has the numbers
    this.legend = el("ul", { class: "legend" });
    this.node = el("figure", { class: "panel chart" },
      el("figcaption", {}, el("h3", {}, options.title, options.extra), this.legend),
      this.plot, el("p", { class: "note" }, options.note ?? ""));
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

  // Shows the values at x, or the newest ones.
  read(x) {
    for (const line of this.lines) {
      let place = x === null ? line.y.findLastIndex((value) => value !== null) : line.x.indexOf(x);
      if (place < 0 && typeof x === "number") place = line.x.findLastIndex((each) => each <= x);
      line.value.replaceChildren(number(line.y[place]));
    }
  }

  async draw() {
    this.isDrawn = true;
    try {
      const plotly = await loadPlotly();
      if (this.isClosed) return;
      const isFirst = !this.plot.classList.contains("js-plotly-plot");
      await plotly.react(this.plot, this.lines.map((line, place) => this.trace(line, place)), this.layout(), { displayModeBar: false, responsive: true });
      if (!isFirst) return;
      this.plot.on("plotly_hover", ({ event, points }) => {
        if (!event) return; // our own call
        this.board.point(points[0].x, this);
        this.board.onstep(points[0].x);
      });
      this.plot.on("plotly_unhover", ({ event }) => {
        if (!event) return;
        this.board.leave();
        this.board.onstep(null);
      });
    } catch (error) {
      this.plot.replaceChildren(el("p", { class: "empty" }, error.message));
    }
  }

  trace(line, place) {
    const shown = colour(`--line-${place % NUM_COLOURS}`);
    const known = line.y.filter((value) => value !== null).length;
    const hasGaps = known === 1 || (known < line.y.length && known <= MAX_MARKERS);
    return {
      x: line.x, y: line.y, type: "scatter", mode: hasGaps && !this.options.isStacked ? "lines+markers" : "lines",
      connectgaps: true, hoverinfo: "none", showlegend: false, marker: { size: 4, color: shown },
      line: { color: shown, width: this.options.isStacked ? 0.5 : 1.6, dash: this.options.isStacked ? "solid" : DASHES[place % DASHES.length] },
      ...(this.options.isStacked ? { stackgroup: "all" } : {}),
    };
  }

  layout() {
    const xs = this.lines.flatMap(({ x }) => x).filter((x) => typeof x === "number");
    const [first, last] = xs.length ? xs.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [xs[0], xs[0]]) : [0, 1];
    const axis = {
      gridcolor: colour("--border"), linecolor: colour("--border"), zeroline: false, tickfont: { size: 11 },
      showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "solid", spikecolor: colour("--muted"), spikesnap: "hovered data",
    };
    return {
      height: this.options.height ?? HEIGHT, uirevision: "zoom", margin: { l: 48, r: 10, t: 6, b: 26 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { family: "system-ui, sans-serif", color: colour("--muted") }, hovermode: "x", hoverdistance: -1,
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: { ...axis, showgrid: false, nticks: 6, range: first < last ? [first, last] : [first - 1, last + 1] },
      yaxis: {
        ...axis, showspikes: false, fixedrange: true, nticks: 5, exponentformat: "e",
        ...(this.options.isLog ? { type: "log", dtick: 1 } : {}), rangemode: this.options.isStacked ? "tozero" : "normal",
      },
    };
  }

  close() {
    this.isClosed = true;
    if (globalThis.Plotly && this.isDrawn) globalThis.Plotly.purge(this.plot);
    this.node.remove();
  }
}
