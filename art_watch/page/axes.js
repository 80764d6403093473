// Where the axes of a chart begin and end, what their ticks say, and where a line has gaps. Pure computations.
//
// Kinds of values: "amount" (counts, shares, seconds: the axis begins at 0), "ratio" (it shows 0.8 to 1.2 at least), none.

const CONSTANT = 1e-3; // a smaller spread, against the size of the values, is shown as a constant
const ROOM = 0.05; // below and above the values, so that a line at an end is seen whole
const NUM_TICKS = 4, MOST_DECADES = 5;
const OUTLIER = 100; // ratios that differ more have a logarithmic axis
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

// The kind of a metric's values, by its name.
export function kindOf(name) {
  if (/ratio/.test(name)) return "ratio";
  return /^(time|throughput|data)\/|num_|tokens|count|fraction|share|saving|rate$|entropy|grad_norm|_std_dev$/.test(name) ? "amount" : null;
}

// Of a vertical axis: whether it is logarithmic, whether it leaves out values of 0 or less, its range (logarithms, if it is
// logarithmic) and its ticks.
export function rangeOf(values, kind, wantsLog) {
  const known = values.filter(Number.isFinite), positive = known.filter((value) => value > 0);
  const ends = (numbers) => numbers.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [numbers[0], numbers[0]]);
  const isLog = positive.length > 0 && (wantsLog || (kind === "ratio" && ends(positive)[1] > OUTLIER * ends(positive)[0]));
  let [low, high] = known.length ? ends(isLog ? positive : known) : [0, 1];
  if (kind === "ratio") [low, high] = [Math.min(0.8, low), Math.max(1.2, high)];
  else if (!isLog) {
    const reach = kind === "amount" ? Infinity : high - low; // 0 is shown if it is as near as the values are to each other
    if (low > 0 && low <= reach) low = 0;
    if (high < 0 && -high <= reach) high = 0;
  }
  const middle = (low + high) / 2;
  if (high - low <= CONSTANT * Math.abs(middle) || low === high) {
    const half = Math.abs(middle) / 10;
    [low, high] = middle === 0 ? [0, 1] : [middle - half, middle + half];
  }
  if (isLog) return { isLog, isCut: positive.length < known.length, ...logarithmic(low, high) };
  const room = ROOM * (high - low), range = [low - room, high + room];
  return { isLog, range, ticks: ticks(...range, NUM_TICKS, kind === "amount" && known.every(Number.isInteger)) };
}

// Ticks are powers of ten; over less than two of them also their double and fivefold; round numbers, if these are few.
function logarithmic(low, high) {
  const room = ROOM * Math.log10(high / low), range = [Math.log10(low) - room, Math.log10(high) + room];
  const [least, most] = range.map((end) => 10 ** end);
  const near = most / least < 100 ? oneTwoFive(least, most) : null;
  if (near && near.length < 3) return { range, ticks: ticks(least, most, NUM_TICKS) };
  const first = Math.ceil(range[0]), step = Math.ceil((Math.floor(range[1]) - first + 1) / MOST_DECADES), powers = [];
  for (let power = first; power <= range[1]; power += step) powers.push(Number(`1e${power}`));
  const values = near ?? powers;
  return { range, ticks: { values, labels: values.map((value) => labelOf(value, value, value)) } };
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
