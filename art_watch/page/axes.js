// Where the axes of a chart begin and end, what their ticks say, and where a line has gaps. Pure computations.
//
// Kinds of values: "amount" (counts, shares, seconds: the axis begins at 0), "ratio" (it shows 0.8 to 1.2 at least), none.

const CONSTANT = 1e-3; // a smaller spread, against the size of the values, is shown as a constant
const ROOM = 0.05;
const NUM_TICKS = 4, MOST_DECADES = 5;
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

// The kind of a metric's values, by its name.
export function kindOf(name) {
  if (/ratio/.test(name)) return "ratio";
  return /^(time|throughput|data)\/|num_|tokens|count|fraction|share|saving|rate$|entropy|grad_norm|_std_dev$/.test(name) ? "amount" : null;
}

// Of a vertical axis: whether it is logarithmic, its range (logarithms, if it is) and its ticks.
export function rangeOf(values, kind, isLog) {
  const known = values.filter(Number.isFinite);
  const ends = (numbers) => numbers.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [numbers[0], numbers[0]]);
  const positive = known.filter((value) => value > 0);
  if (isLog && positive.length) return { isLog: true, ...decades(...ends(positive)) };
  let [low, high] = known.length ? ends(known) : [0, 1];
  if (kind === "amount") [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (kind === "ratio") [low, high] = [Math.min(0.8, low), Math.max(1.2, high)];
  const middle = (low + high) / 2;
  if (high - low <= CONSTANT * Math.abs(middle) || low === high) {
    const half = Math.abs(middle) / 10 || 1;
    [low, high] = kind === "amount" ? [0, 1] : [middle - half, middle + half];
  }
  const room = ROOM * (high - low);
  const isWhole = kind === "amount" && known.every(Number.isInteger);
  const range = [low - (kind === "amount" && low === 0 ? 0 : room), high + (kind === "amount" && high === 0 ? 0 : room)];
  return { isLog: false, range, ticks: ticks(...range, NUM_TICKS, isWhole) };
}

// Powers of ten; over less than two of them also their double and fivefold.
function decades(low, high) {
  const near = high / low < 100 && high > 1.5 * low ? oneTwoFive(low, high) : [];
  if (near.length > 1) {
    const room = ROOM * Math.log10(high / low);
    return { range: [Math.log10(low) - room, Math.log10(high) + room], ticks: { values: near, labels: near.map((value) => labelOf(value, value, value)) } };
  }
  const first = Math.floor(Math.log10(low) + 1e-9), last = Math.max(first + 1, Math.ceil(Math.log10(high) - 1e-9));
  const step = Math.ceil((last - first) / MOST_DECADES), values = [];
  for (let power = first; power <= last; power += step) values.push(Number(`1e${power}`));
  return { range: [first, last], ticks: { values, labels: values.map((value) => labelOf(value, value, value)) } };
}

function oneTwoFive(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) found.push(...[1, 2, 5].map((each) => Number(`${each}e${power}`)));
  return found.filter((value) => value >= low && value <= high);
}

// Round numbers between two others, about `count` of them, and their labels.
export function ticks(low, high, count, isWhole = false) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const found = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.7);
  const step = isWhole ? Math.max(1, Math.round(found)) : found;
  const values = [], largest = Math.max(Math.abs(low), Math.abs(high));
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number++) values.push(Number((number * step).toPrecision(12)));
  return { values, labels: values.map((value) => labelOf(value, step, largest)) };
}

// A tick's text, exact to the step: 80k and not 0.8e+5, 2e-5 and not 0.00002.
export function labelOf(value, step, largest) {
  if (value === 0) return "0";
  const decimals = (size) => Math.max(0, -Math.floor(Math.log10(size) + 1e-9));
  if (largest >= 1e4) {
    const [unit, letter] = UNITS.find(([size]) => largest >= size);
    return `${(value / unit).toFixed(decimals(step / unit))}${letter}`;
  }
  if (largest < 1e-3) {
    const power = Math.floor(Math.log10(largest) + 1e-9);
    return `${(value / 10 ** power).toFixed(decimals(step / 10 ** power))}e${power}`;
  }
  return value.toLocaleString("en", { minimumFractionDigits: decimals(step), maximumFractionDigits: decimals(step) });
}

// The known points of a line {x, y, steps}, with a null where more steps are missing than this line usually lacks. `alone`
// has the points between two gaps, as [x, y]; `isSparse`: most steps have no value.
export function withGaps({ x, y, steps }) {
  const places = y.flatMap((value, place) => (value === null || value === undefined || x[place] === null ? [] : [place]));
  const at = (place) => (steps ? steps[place] : place);
  const spaces = places.slice(1).map((place, number) => at(place) - at(places[number])).sort((a, b) => a - b);
  const usual = spaces[Math.floor(spaces.length / 2)] ?? 1;
  const found = { x: [], y: [], alone: [], isSparse: usual > 1 };
  const isNear = (one, other) => one !== undefined && other !== undefined && at(other) - at(one) <= usual;
  places.forEach((place, number) => {
    const [before, after] = [places[number - 1], places[number + 1]];
    if (number && !isNear(before, place)) {
      found.x.push(x[before]);
      found.y.push(null);
    }
    found.x.push(x[place]);
    found.y.push(y[place]);
    if (!isNear(before, place) && !isNear(place, after)) found.alone.push([x[place], y[place]]);
  });
  return found;
}

// The runs of rows in which any line has a value, as lists of rows.
export function segments(lines) {
  const found = [[]];
  (lines[0]?.x ?? []).forEach((_, row) => {
    if (lines.some(({ y }) => (y[row] ?? null) !== null)) found.at(-1).push(row);
    else if (found.at(-1).length) found.push([]);
  });
  return found.filter((rows) => rows.length);
}

// An exponential mean over about `span` values, without a bias to the first; gaps stay.
export function smoothed(values, span) {
  const keep = 1 - 2 / (span + 1);
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + value;
    weight = keep * weight + 1;
    return sum / weight;
  });
}
