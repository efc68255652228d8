// The calls in view, one by one: bars on the ground of what their rank computes, hatched while they wait. The page
// holds the calls as columns of numbers, rank by rank in the order of start; bisection finds those in view.

const MOST_DEEP = 4; // rows of calls that a rank is in at the same time
const FLAT_PX = 10; // lower lanes have their bars one on another, and their shares mixed
const TOP_PX = 16; // for the names of steps
const DASHES = { derived: [5, 3], inferred: [1, 3] };
const STUCK = -1; // as the time that a call took: it has not come out

const kindOf = (data, operation) => data.kinds[data.kind[operation]];
const endOf = ({ start, took, length }, call) => (took[call] === STUCK ? length : start[call] + Math.max(0, took[call]));

// What can be asked of the columns again and again: when each call and each operation begins, and how deep calls lie.
function indexed(data) {
  const { start, took, operation, first } = data;
  data.begins = new Int32Array(data.operations).fill(2 ** 31 - 1);
  data.ends = new Int32Array(data.operations);
  data.latest = new Int32Array(start.length); // the last end of all calls up to this one
  data.lanes.forEach((_, lane) => {
    for (let i = first[lane]; i < first[lane + 1]; i += 1) {
      if (i > first[lane]) start[i] += start[i - 1];
      const end = endOf(data, i);
      if (took[i] === STUCK) data.waited[i] = end - start[i];
      data.latest[i] = i > first[lane] ? Math.max(end, data.latest[i - 1]) : end;
      data.begins[operation[i]] = Math.min(data.begins[operation[i]], start[i]);
      data.ends[operation[i]] = Math.max(data.ends[operation[i]], end);
    }
  });
  data.row = rowsOf(data);
  data.depth = data.row.reduce((most, row) => Math.max(most, row + 1), 1); // one for all lanes: height is no load
  data.never = [...data.kind.keys()].filter((operation) => kindOf(data, operation).absent.length);
  data.ofLane = data.lanes.map(() => []); // cells by step
  for (const cell of data.cells) data.ofLane[cell[1]][cell[0]] = cell;
  return data;
}

// The row of each call in its lane: its bucket's, or the first that is free; `clear`: until when no other lies on it.
function rowsOf(data) {
  const { first, start } = data;
  data.clear = start.map((_, i) => endOf(data, i));
  const rows = new Uint8Array(start.length);
  for (const lane of data.lanes.keys()) {
    const [until, last] = [-1, -1].map((none) => new Array(MOST_DEEP).fill(none));
    for (let i = first[lane]; i < first[lane + 1]; i += 1) {
      const own = Math.min(kindOf(data, data.operation[i]).bucket, MOST_DEEP - 1);
      const free = until[own] <= start[i] ? own : until.findIndex((end) => end <= start[i]);
      rows[i] = free < 0 ? MOST_DEEP - 1 : free;
      data.clear[last[rows[i]]] = Math.min(data.clear[last[rows[i]]], start[i]);
      [until[rows[i]], last[rows[i]]] = [endOf(data, i), i];
    }
  }
  return rows;
}

// Top and height of a call's bar in its lane.
function barOf(data, call, [top, bottom]) {
  const high = (bottom - top) / data.depth;
  return bottom - top < FLAT_PX ? [top, bottom - top] : [top + high * data.row[call], high];
}

// The first place in [from, to) whose value is not below `least`; values do not fall.
function bisect(values, from, to, least) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] < least) from = middle + 1;
    else to = middle;
  }
  return from;
}

const inView = ({ first, start, latest }, lane, [from, to]) => {
  const [begin, end] = [first[lane], first[lane + 1]];
  return [bisect(latest, begin, end, from), bisect(start, begin, end, to)];
};

// A canvas that is sharp, and where a time of this window stands on it, right of the names of lanes.
function drawing(canvas, height, window, margin, colors) {
  const [width, ratio] = [canvas.clientWidth, devicePixelRatio || 1];
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  canvas.style.height = `${height}px`;
  const ink = canvas.getContext("2d");
  ink.scale(ratio, ratio);
  ink.font = "11px system-ui, sans-serif";
  const scale = (width - margin) / (window[1] - window[0]);
  const x = (at) => margin + (Math.min(Math.max(at, window[0]), window[1]) - window[0]) * scale;
  return { ink, width, window, margin, scale, x, colors };
}

function paint({ ink }, color, box, alpha = 1) {
  [ink.fillStyle, ink.globalAlpha] = [color, alpha];
  ink.fillRect(...box);
  ink.globalAlpha = 1;
}

// Waiting looks the same everywhere: hatches that rise, in the colour of the call; too narrow for them, a pale place.
const hatches = new Map();
function hatch({ ink, colors }, color, box, alpha = 1) {
  if (!hatches.has(color)) {
    const tile = Object.assign(document.createElement("canvas"), { width: 6, height: 6 });
    const pen = Object.assign(tile.getContext("2d"), { strokeStyle: color });
    pen.stroke(new Path2D("M-1 1 1-1M0 6 6 0M5 7 7 5"));
    hatches.set(color, ink.createPattern(tile, "repeat"));
  }
  paint({ ink }, colors.paper, box, alpha * 0.7);
  paint({ ink }, box[2] < 3 ? color : hatches.get(color), box, box[2] < 3 ? alpha / 2 : alpha);
}

// Text on anything: a halo of paper keeps it readable.
function write({ ink, colors }, text, x, y, color, most) {
  Object.assign(ink, { fillStyle: color, strokeStyle: colors.paper, lineWidth: 4 });
  ink.strokeText(text, x, y, most);
  ink.fillText(text, x, y, most);
}

// The names of lanes: all where they have room, else those; before them, and in bold, those that the title names.
function drawNames(view, data, top, high, isNamed) {
  const [{ ink, colors, margin }, { font }, written] = [view, view.ink, []];
  for (const lane of new Set([...data.marked, ...data.lanes.keys()])) {
    const [isMarked, y] = [data.marked.includes(lane), top + high * (lane + 0.5) + 4];
    if (!(isMarked || high > FLAT_PX || isNamed(lane)) || written.some((other) => Math.abs(other - y) < FLAT_PX)) continue;
    written.push(y);
    ink.font = isMarked ? `bold ${font}` : font;
    const isAbsent = data.never.some((operation) => kindOf(data, operation).absent.includes(lane));
    write(view, data.lanes[lane], 0, y, isAbsent ? colors.missing : colors.ink, margin - 8);
  }
  ink.font = font;
}

function drawBars(view, data, lane, [top, bottom]) {
  const { ink, x, window, colors } = view;
  const ground = { first: data.ground_first, start: data.ground_start, latest: data.ground_end };
  const [from, until] = inView(ground, lane, window);
  for (let i = from; i < until; i += 1) {
    const [left, right] = [x(ground.start[i]), x(ground.latest[i])];
    const [[color, on], number] = [data.grounds[data.ground[i]][1][colors.night], data.micro_batch[i]];
    paint(view, color, [left, top, right - left, bottom - top]);
    if (number < 0 || bottom - top < 2 * FLAT_PX || right - left < ink.measureText(number).width + 4) continue;
    ink.fillStyle = on;
    ink.fillText(number, left + 3, bottom - 5);
  }
  const [begin, end] = inView(data, lane, window);
  for (let i = begin; i < end; i += 1) {
    const { look, mark } = kindOf(data, data.operation[i]);
    const [color, on] = data.colors[look][colors.night];
    const stuck = data.took[i] === STUCK;
    const [left, middle, right] = [data.start[i], data.start[i] + data.waited[i], endOf(data, i)].map(x);
    const [y, high] = barOf(data, i, [top, bottom]);
    const gap = high < FLAT_PX ? 0 : 1;
    if (middle > left) hatch(view, color, [left, y + gap, middle - left, high - 2 * gap]);
    if (!stuck) paint(view, color, [middle, y + gap, Math.max(1, right - middle), high - 2 * gap]);
    const text = 4 + (stuck ? left : middle);
    if (high <= 12 || x(data.clear[i]) - text < ink.measureText(mark).width + 2) continue;
    if (stuck) write(view, mark, text, y + high / 2 + 4, colors.ink);
    ink.fillStyle = stuck ? colors.ink : on;
    ink.fillText(mark, text, y + high / 2 + 4);
  }
}

// In the lane of each rank that never came to an operation, a red place for as long as the others are in it.
function drawNever(view, data, placeOf) {
  const { ink, x, window, colors } = view;
  for (const operation of data.never) {
    if (data.begins[operation] > window[1] || data.ends[operation] < window[0]) continue;
    const [left, right] = [x(data.begins[operation]), x(data.ends[operation])];
    for (const lane of kindOf(data, operation).absent) {
      const [top, high] = placeOf(lane, data.operation.indexOf(operation));
      const box = [left + 1, top + 1, Math.max(3, right - left - 2), high - 2];
      paint(view, colors.missing, box, high < FLAT_PX ? 1 : 0.2);
      Object.assign(ink, { strokeStyle: colors.missing, lineWidth: 1.5 });
      ink.strokeRect(...box);
      if (high > 12 && right - left > 90) write(view, "✖ never came", right - 84, top + high / 2 + 4, colors.missing);
    }
  }
}

// All ranks of an operation in a frame, where the last of them came, and who sent to whom in it: from when the sender
// stopped waiting to when the receiver was done.
function drawChosen({ ink, scale, margin, window, width, colors }, data, calls, placeOf, bottom) {
  const places = new Map(calls.map(({ i, lane }) => [lane, { i, at: placeOf(lane, i) }]));
  ink.save();
  ink.clip(new Path2D(`M${margin} 0H${width}V${bottom}H${margin}Z`));
  const at = (time) => margin + (time - window[0]) * scale; // also out of view
  ink.strokeStyle = colors.ink;
  for (const { i, at: [top, high] } of places.values()) {
    ink.lineWidth = high < FLAT_PX ? 0.5 : 2;
    ink.strokeRect(at(data.start[i]) - 1, top, Math.max(3, (endOf(data, i) - data.start[i]) * scale + 2), high);
  }
  ink.setLineDash([3, 3]);
  if (calls.length > 1) ink.strokeRect(at(Math.max(...calls.map(({ i }) => data.start[i]))), TOP_PX, 0, bottom);
  const { pairs } = kindOf(data, data.operation[calls[0].i]);
  Object.assign(ink, { fillStyle: colors.ink, globalAlpha: Math.max(0.15, Math.min(1, 24 / pairs.length)) }); // Many are a shade.
  for (const [src, dst, , , how] of pairs) {
    const [sent, got] = [places.get(src), places.get(dst)];
    if (src === dst || !sent || !got) continue;
    const [left, right] = [at(data.start[sent.i] + data.waited[sent.i]), at(endOf(data, got.i))];
    const [from, to] = [sent, got].map(({ at: [top, high] }) => top + high / 2);
    const way = Math.atan2(to - from, right - left);
    ink.beginPath();
    ink.moveTo(left, from);
    ink.lineTo(right, to);
    for (const [color, wide, dash] of [[colors.paper, 4, []], [colors.ink, 1.5, DASHES[how] ?? []]]) {
      Object.assign(ink, { strokeStyle: color, lineWidth: wide });
      ink.setLineDash(dash);
      ink.stroke();
    }
    ink.beginPath();
    ink.moveTo(right, to);
    for (const side of [-0.4, 0.4]) ink.lineTo(right - 9 * Math.cos(way + side), to - 9 * Math.sin(way + side));
    ink.fill();
  }
  ink.restore();
}
