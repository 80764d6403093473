// Tokens coloured by one of their numbers. Hue and underline show the sign, strength the size; the numbers themselves
// are under each token, or beside the one that the pointer or the focus is on.

import { el, short, signed, tips } from "./dom.js";

const SMALLEST_RATIO = 1e-5; // what is smaller is rounded to 0, which has no logarithm

// `of(sequence, i)`: the number of a token, or null. `least`: the smallest end of the scale; `fixed`: its end.
export const COLOURS = {
  logprob: { label: "log-probability", of: (s, i) => s.sampled_logprobs[i], fixed: 5, ends: ["−5 or less", "0"] },
  gap: { label: "gap (trainer − sampled)", of: (s, i) => difference(s.trainer_logprobs?.[i], s.sampled_logprobs[i]), least: 1e-4 },
  ratio: { label: "ratio", of: (s, i) => s.ratios?.[i], level: (ratio) => Math.log(Math.max(ratio, SMALLEST_RATIO)), least: 0.05 },
  advantage: { label: "advantage", of: (s, i) => s.advantages?.[i], least: 0.1 },
  entropy: { label: "entropy", of: (s, i) => s.entropies?.[i], least: 1, isPositive: true },
  trained: { label: "trained or not", of: (s, i) => (isTrained(s, i) ? 1 : s.sampled_logprobs[i] === null ? null : 0), fixed: 1, isKind: true },
};

function difference(a, b) {
  return a === null || a === undefined || b === null ? null : Number((a - b).toFixed(5));
}

function isTrained(sequence, i) {
  return sequence.trainer_logprobs?.[i] !== null && sequence.trainer_logprobs?.[i] !== undefined;
}

const levelOf = (colour, value) => (COLOURS[colour].level ?? Number)(value);

export function hasNumbers(colour, sequences) {
  if (colour === "trained") return sequences.some((s) => s.trainer_logprobs);
  return sequences.some((s) => s.texts.some((_, i) => (COLOURS[colour].of(s, i) ?? null) !== null));
}

// The level with the strongest colour.
export function scaleOf(colour, sequences) {
  const { fixed, least, of } = COLOURS[colour];
  if (fixed) return fixed;
  let largest = least;
  for (const sequence of sequences) {
    for (let i = 0; i < sequence.texts.length; i++) {
      const value = of(sequence, i);
      if (value !== null && value !== undefined) largest = Math.max(largest, Math.abs(levelOf(colour, value)));
    }
  }
  return largest;
}

export function legend(colour, scale) {
  const { isKind, isPositive, ends, level } = COLOURS[colour];
  const swatch = (name, strength) => {
    const found = el("span", { class: `token ${name}` }, " sample ");
    found.style.setProperty("--level", strength);
    return found;
  };
  if (isKind) return el("span", { class: "legend-scale" }, swatch("plus", 1), "trained", swatch("minus", 0.35), "sampled, not trained", swatch("", 0), "context");
  const end = level ? (sign) => short(Math.exp(sign * scale)) : (sign) => signed(sign * scale);
  const [low, high] = ends ?? (isPositive ? ["0", end(1)] : [end(-1), end(1)]);
  return el("span", { class: "legend-scale" }, low,
    el("span", { class: `ramp ${isPositive ? "rising" : ends ? "falling" : "both"}`, "aria-hidden": "true" }), high,
    !ends && !isPositive && el("span", { class: "muted" }, `middle ${level ? 1 : 0}`));
}

function describe(sequence, i) {
  const number = (name, value) => (value === null || value === undefined ? null : `${name} ${value}`);
  const logprob = sequence.sampled_logprobs[i];
  return [
    `${JSON.stringify(sequence.texts[i])}${sequence.ids ? ` id ${sequence.ids[i]}` : ""}, position ${i}`,
    logprob === null ? "context, not sampled" : `log-probability ${logprob} (p ${short(Math.exp(logprob))})`,
    number("trainer's", sequence.trainer_logprobs?.[i]),
    number("gap", COLOURS.gap.of(sequence, i)),
    number("ratio", sequence.ratios?.[i]) && `ratio ${sequence.ratios[i]}${sequence.is_clipped[i] ? ", clipped" : ""}`,
    number("advantage", sequence.advantages?.[i]),
    number("entropy", sequence.entropies?.[i]),
    logprob !== null && sequence.trainer_logprobs && (isTrained(sequence, i) ? "trained" : "not trained"),
  ].filter(Boolean);
}

// The tokens [start, stop) of a sequence.
export function tokenBlock(sequence, start, stop, colour, scale, hasFigures, label) {
  const { of } = COLOURS[colour];
  const spans = [];
  for (let i = start; i < stop; i++) {
    const value = of(sequence, i) ?? null;
    const level = value === null ? 0 : levelOf(colour, value);
    const sign = COLOURS[colour].isKind ? (value === 1 ? "plus" : "minus") : level < 0 ? "minus" : "plus";
    const text = sequence.texts[i];
    const span = el("span", {
      class: ["token", value !== null && sign, text.includes("\n") && "newline", sequence.is_clipped?.[i] && "clipped"].filter(Boolean).join(" "),
      tabindex: -1, "data-place": i, "data-figure": hasFigures && value !== null ? short(value) : null,
    }, text);
    if (value !== null) span.style.setProperty("--level", COLOURS[colour].isKind ? (value ? 1 : 0.35) : Math.min(1, Math.abs(level) / scale).toFixed(3));
    spans.push(span);
  }
  const block = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `${label}. Arrow keys move between tokens.` }, spans);
  block.addEventListener("keydown", (event) => {
    const ahead = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!ahead || event.shiftKey) return;
    event.preventDefault();
    const place = spans.indexOf(document.activeElement);
    spans[place < 0 ? 0 : Math.max(0, Math.min(spans.length - 1, place + ahead))]?.focus();
  });
  tips(block, (target) => (target.dataset.place ? describe(sequence, Number(target.dataset.place)) : null));
  return block;
}
