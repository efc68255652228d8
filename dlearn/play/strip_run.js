// A run of many steps: shares of the time in columns, who was waited for, and the ruler.

const STEP_PX = 20; // narrower steps are shown as shares
const COLUMN_PX = 10;
const LENGTH_PX = 3; // of a column above, which has the lengths only

// The first of 1, 2, 5, 10, 20, ... that is not below it, also of parts of 1.
function nice(least) {
  const ten = 10 ** Math.floor(Math.log10(least));
  return ten * [1, 2, 5, 10].find((each) => each * ten >= least * 0.999);
}

// Columns that can be seen, of a step or more each; a step that is wide itself begins one.
function columnsOf(data, { window, scale }, px = COLUMN_PX) {
  const wide = px / scale;
  const starts = [];
  const placeOf = (step) => data.steps[step]?.[1] ?? data.length;
  data.steps.forEach(([, from, to], step) => {
    if (!starts.length || from - placeOf(starts.at(-1)) >= wide || to - from >= 2 * wide) starts.push(step);
  });
  const ends = [...starts.slice(1), data.steps.length];
  return starts.map((step, i) => ({ step, after: ends[i], from: placeOf(step), to: placeOf(ends[i]) }))
    .filter(({ from, to }) => to >= window[0] && from <= window[1]);
}

// What a rank did in the steps of a column: computed, sent, waited, as shares of its time.
function stepColumn(data, lane, { step, after }, night) {
  const cells = data.ofLane[lane].slice(step, after).filter((cell) => cell);
  if (!cells.length) return { from: 0, to: 0, parts: [] };
  const [from, [, , begin, length]] = [cells[0][2], cells.at(-1)];
  const to = length < 0 ? data.length : (data.ofLane[lane][after]?.[2] ?? begin + length);
  const sums = [4, 5, 6].map((part) => cells.reduce((sum, cell) => sum + (cell[part] ?? 0), 0));
  if (length < 0) sums[2] += to - begin;
  const whole = Math.max(1, to - from, sums[0] + sums[1] + sums[2]);
  const shades = [data.computes, data.transfer, data.waits];
  return { from, to, parts: sums.map((sum, part) => [shades[part][night][0], sum / whole, part === 2]) };
}

// Calls that are too many for bars: in columns of time their shares, a colour for each operation, then what waits.
function callColumns(data, lane, { window, scale, colors }) {
  const [wide, looks] = [nice(COLUMN_PX / scale), data.colors.length]; // They stay where they are when the window moves.
  const first = Math.floor(window[0] / wide);
  return Array.from({ length: Math.ceil(window[1] / wide) - first }, (_, column) => {
    const [from, to] = [(first + column) * wide, (first + column + 1) * wide];
    const sums = new Array(2 * looks).fill(0);
    const within = (begin, end) => Math.max(0, Math.min(end, to) - Math.max(begin, from));
    const [begin, end] = inView(data, lane, [from, to]);
    for (let i = begin; i < end; i += 1) {
      const [{ look }, middle] = [kindOf(data, data.operation[i]), data.start[i] + data.waited[i]];
      sums[look] += within(middle, endOf(data, i));
      sums[looks + look] += within(data.start[i], middle);
    }
    const whole = Math.max(wide, sums.reduce((sum, length) => sum + length));
    return { from, to, parts: sums.map((sum, i) => [data.colors[i % looks][colors.night][0], sum / whole, i >= looks]) };
  });
}

// Shares one on another; in a low lane side by side.
function drawColumns(view, columns, [top, bottom]) {
  const [high, isFlat] = [bottom - top, bottom - top < FLAT_PX];
  for (const { from, to, parts } of columns) {
    const [left, right] = [from, to].map((at) => Math.round(view.x(at)));
    const wide = Math.max(1, right - left - 1);
    let sum = 0;
    for (const [color, share, waits] of parts) {
      sum += share;
      const box = isFlat ? [left + (sum - share) * wide, top, share * wide, high] : [left, bottom - sum * high, wide, share * high];
      if (share * (isFlat ? wide : high) >= 0.2) (waits ? hatch : paint)(view, color, box);
    }
  }
}

// How long each step took: of steps that share a column the mean, and as its cap the longest.
function drawLengths(view, data, high) {
  const { x, colors, margin, width } = view;
  const most = data.steps.reduce((most, [, , , , length]) => Math.max(most, length), 1);
  const topOf = (length) => 3 + (high - 3) * (1 - length / most);
  for (const { step, after, from, to } of columnsOf(data, view, LENGTH_PX)) {
    const [left, wide] = [x(from), Math.max(1, x(to) - x(from) - 0.5)];
    const steps = data.steps.slice(step, after);
    const lengths = steps.map(([, , , , length]) => (length < 0 ? most : length)); // hatched, as it never ended
    const mean = topOf(lengths.reduce((sum, length) => sum + length) / lengths.length);
    const isLongest = data.longest.some(([each]) => each >= step && each < after);
    const [color, strength] = isLongest ? [colors.ink, 1] : [colors.faint, 0.55];
    (steps.at(-1)[4] < 0 ? hatch : paint)(view, color, [left, mean, wide, high + 1 - mean], strength);
    paint(view, color, [left, topOf(Math.max(...lengths)), wide, 2]);
  }
  const middle = topOf(data.median);
  for (let left = margin; left < width; left += 4) paint(view, colors.ink, [left, middle, 1, 1]);
  write(view, timeText(most * data.unit_ns), 0, 10, colors.faint, margin - 6);
  write(view, timeText(data.median * data.unit_ns), 0, Math.max(22, middle + 4), colors.faint, margin - 6);
}

// A row for each rank: in each column of steps the stronger, the longer the others waited for it; red: without end.
function drawAwaited(view, data, columns, low, high) {
  const { x, colors } = view;
  write(view, "waited for", 0, low + 12, colors.faint);
  const sumOf = (lane, { step, after }) => data.awaited.slice(step, after).reduce((sum, lanes) => sum + lanes[lane], 0);
  const rows = data.lanes.map((_, lane) => columns.map((column) => sumOf(lane, column)));
  const most = Math.max(1, ...rows.flat());
  data.lanes.forEach((_, lane) => {
    const boxOf = (from, to) => [x(from), low + 21 + lane * high, Math.max(1, x(to) - x(from) - 1), high - 1];
    columns.forEach(({ from, to }, i) => paint(view, colors.ink, boxOf(from, to), Math.sqrt(rows[lane][i] / most)));
    const never = data.never.filter((operation) => kindOf(data, operation).absent.includes(lane));
    for (const operation of never) paint(view, colors.missing, boxOf(data.begins[operation], data.ends[operation]));
  });
  drawNames(view, data, low + 20, high, (lane) => lane % (data.lanes.length - 1) === 0 || rows[lane].includes(most));
}

// Ticks at round times. Where they would have more than four digits, they count from a time that stands at the left.
function drawRuler(view, data, top) {
  const { ink, x, window, width, margin, colors } = view;
  const [from, to] = window.map((at) => at * data.unit_ns);
  const step = nice(((to - from) * 60) / (width - margin));
  const base = to / 10 ** Math.floor(Math.log10(step) + 0.001) < 9999 ? 0 : Math.floor(from / (1000 * step)) * 1000 * step;
  const [unit, scale] = unitOf(to - base, TIMES);
  const digits = Math.max(0, Math.ceil(Math.log10(scale / step) - 0.001));
  paint(view, colors.faint, [margin, top, width - margin, 1]);
  ink.textAlign = "center";
  for (let [at, free] = [Math.ceil(from / step) * step, 0]; at <= to; at += step) {
    const text = `${base ? "+" : ""}${((at - base) / scale).toFixed(digits)} ${unit}`;
    const [left, half] = [x(at / data.unit_ns), ink.measureText(text).width / 2];
    ink.fillRect(left, top, 1, 5);
    if (left - half < free || left + half > width) continue;
    ink.fillText(text, left, top + 17);
    free = left + half + 6;
  }
  ink.textAlign = "left";
  const [baseUnit, baseScale] = unitOf(base, TIMES);
  if (base) ink.fillText(`≈ ${(base / baseScale).toPrecision(4)} ${baseUnit}`, 0, top + 5, margin - 4);
}
