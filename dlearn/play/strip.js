// The strip: every call of every rank over time. Above stands the whole run, with a frame around the part that the
// lanes below show. The page holds the calls as columns of numbers, rank by rank in the order of start. Bisection
// finds the calls in view; they are drawn as bars, or, where these are too many, as shares of the time.

const MARGIN_PX = 92;
const LANES_PX = 320;
const TOP_PX = 16; // for the names of steps
const MOST_DEEP = 4; // rows of calls that a rank is in at the same time
const ZOOM = 1.35;
const DASHES = { derived: [5, 3], inferred: [1, 3] };
const STUCK = -1; // as the time that a call took: it has not come out

const kindOf = (data, operation) => data.kinds[data.kind[operation]];
const endOf = ({ start, took }, call) => (took[call] === STUCK ? Infinity : start[call] + Math.max(0, took[call]));

// What can be asked of the columns again and again: when each call and each operation begins, and how deep calls lie.
function indexed(data) {
  const { start, took, operation, first } = data;
  data.begins = new Int32Array(data.operations).fill(2 ** 31 - 1);
  data.ends = new Int32Array(data.operations);
  data.latest = new Int32Array(start.length); // the last end of all calls up to this one
  data.lanes.forEach((_, lane) => {
    for (let i = first[lane]; i < first[lane + 1]; i += 1) {
      if (i > first[lane]) start[i] += start[i - 1];
      const end = Math.min(endOf(data, i), data.length);
      data.latest[i] = i > first[lane] ? Math.max(end, data.latest[i - 1]) : end;
      data.begins[operation[i]] = Math.min(data.begins[operation[i]], start[i]);
      data.ends[operation[i]] = Math.max(data.ends[operation[i]], end);
    }
  });
  data.row = rowsOf(data);
  data.depth = data.row.reduce((most, row) => Math.max(most, row + 1), 1); // one for all lanes: height is no load
  data.never = [...data.kind.keys()].filter((operation) => kindOf(data, operation).absent.length);
  return data;
}

// The row of each call in its lane: the first that is free.
function rowsOf(data) {
  const rows = new Uint8Array(data.start.length);
  data.lanes.forEach((_, lane) => {
    const until = new Array(MOST_DEEP).fill(-1);
    for (let i = data.first[lane]; i < data.first[lane + 1]; i += 1) {
      const free = until.findIndex((end) => end <= data.start[i]);
      rows[i] = free < 0 ? MOST_DEEP - 1 : free;
      until[rows[i]] = endOf(data, i);
    }
  });
  return rows;
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

function sharp(canvas, height) {
  const [width, ratio] = [canvas.clientWidth, window.devicePixelRatio || 1];
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  canvas.style.height = `${height}px`;
  const ink = canvas.getContext("2d");
  ink.scale(ratio, ratio);
  ink.font = "11px system-ui, sans-serif";
  return { ink, width };
}

function paint(ink, color, box, alpha = 1) {
  Object.assign(ink, { fillStyle: color, globalAlpha: alpha });
  ink.fillRect(...box);
  ink.globalAlpha = 1;
}

// The calls of one rank between two heights; `x` says where a time stands.
function drawLane(ink, data, lane, window, [top, bottom], width, colors) {
  const [begin, end] = inView(data, lane, window);
  const scale = (width - MARGIN_PX) / (window[1] - window[0]);
  const x = (at) => MARGIN_PX + (Math.min(Math.max(at, window[0]), window[1]) - window[0]) * scale;
  if (end - begin > 2 * width) return drawShares(ink, data, [begin, end], x, [top, bottom], width);
  const flat = bottom - top < 10; // then one on another
  const high = (bottom - top) / (flat ? 1 : data.depth);
  for (let i = begin; i < end; i += 1) {
    const { color, mark } = kindOf(data, data.operation[i]);
    const until = endOf(data, i);
    const [left, middle, right] = [x(data.start[i]), x(data.start[i] + data.waited[i]), x(until)];
    const y = top + (flat ? 0 : high * data.row[i]);
    const stuck = data.took[i] === STUCK;
    const [from, tall] = [stuck ? left : middle, flat ? high - 1 : high - 2];
    const whole = [left, y + 1, right - left, tall];
    paint(ink, color, stuck ? whole : [left, y + 0.35 * high, middle - left, 0.3 * high], 0.45);
    if (stuck) drawStuck(ink, color, colors.missing, whole);
    else paint(ink, color, [middle, y + 1, Math.max(1, right - middle), tall]);
    if (high > 12 && right - from > 6.5 * mark.length + 6) {
      const fillStyle = stuck ? colors.ink : data.inks[color];
      Object.assign(ink, { fillStyle, strokeStyle: colors.paper, lineWidth: 3 });
      if (stuck) ink.strokeText(mark, from + 4, y + high / 2 + 4);
      ink.fillText(mark, from + 4, y + high / 2 + 4);
    }
  }
}

// On a call that waits for ever: hatches, as on all that waits, and a red end.
function drawStuck(ink, color, red, [left, top, wide, high]) {
  const tile = Object.assign(document.createElement("canvas"), { width: 6, height: 6 });
  const pen = Object.assign(tile.getContext("2d"), { strokeStyle: color });
  pen.stroke(new Path2D("M-1 1 1-1M0 6 6 0M5 7 7 5"));
  paint(ink, ink.createPattern(tile, "repeat"), [left, top, wide, high]);
  paint(ink, red, [left + wide - 4, top, 4, high]);
}

// For each pixel the share of its time in calls, a colour for each operation and paler while it waits.
function drawShares(ink, data, [begin, end], x, [top, bottom], width) {
  const shares = data.colors.map(() => [new Float32Array(width + 1), new Float32Array(width + 1)]);
  const cover = (into, from, to) => {
    const [left, right] = [x(from), x(to)];
    for (let column = Math.floor(left); column < right; column += 1) {
      into[column] += Math.min(right, column + 1) - Math.max(left, column);
    }
  };
  for (let i = begin; i < end; i += 1) {
    const [transfer, waits] = shares[kindOf(data, data.operation[i]).look];
    const middle = data.start[i] + data.waited[i];
    if (data.waited[i]) cover(waits, data.start[i], middle);
    cover(transfer, middle, endOf(data, i));
  }
  const bars = shares.flatMap(([transfer, waits], look) => {
    return [[transfer, data.colors[look], 1], [waits, data.colors[look], 0.45]];
  });
  for (let column = MARGIN_PX; column < width; column += 1) {
    let y = bottom;
    const whole = Math.max(1, bars.reduce((sum, [values]) => sum + values[column], 0));
    for (const [values, color, alpha] of bars) {
      if (!values[column]) continue;
      const high = ((bottom - top) * values[column]) / whole;
      paint(ink, color, [column, (y -= high), 1, high], alpha);
    }
  }
}

function drawTraffic(canvas, data, pairs, colors) {
  const cell = Math.max(2, Math.min(22, Math.floor(200 / data.lanes.length)));
  const side = cell * data.lanes.length;
  canvas.style.width = `${side + 2}px`;
  const { ink } = sharp(canvas, side + 2);
  const most = Math.max(1, ...pairs.values());
  ink.strokeStyle = colors.faint;
  ink.strokeRect(0.5, 0.5, side + 1, side + 1);
  for (const [pair, bytes] of pairs) {
    const [src, dst] = [Math.floor(pair / data.lanes.length), pair % data.lanes.length];
    const box = [1 + cell * dst, 1 + cell * src, cell - 1, cell - 1];
    paint(ink, colors.ink, box, 0.25 + (0.75 * bytes) / most);
  }
}

function mountStrip(root, data) {
  const find = (selector) => root.querySelector(selector);
  const [overview, lanes] = [find(".overview"), find(".lanes")];
  const whole = [0, data.length];
  const laneHigh = Math.max(5, Math.min(70, LANES_PX / data.lanes.length));
  const topOf = (lane) => TOP_PX + laneHigh * lane;
  const low = topOf(data.lanes.length);
  const flat = laneHigh < 11; // then calls lie one on another
  const barHigh = (laneHigh - 1) / (flat ? 1 : data.depth);
  const barTop = (lane, call) => topOf(lane) + 1 + (flat ? 0 : barHigh * data.row[call]);
  let window = whole;
  let chosenStep = -1; // only what is in this span counts
  let chosen = -1; // a call
  const colors = {};
  let now = -1; // the time of the step that a player on this page shows

  const ms = (units) => Number(((units * data.unit_ns) / 1e6).toFixed(6));
  const callsOf = (operation) => data.lanes.flatMap((_, lane) => {
    const calls = data.operation.subarray(data.first[lane], data.first[lane + 1]);
    const number = calls.indexOf(operation);
    return number < 0 ? [] : [{ i: data.first[lane] + number, lane }];
  });

  // The Python that selects what is shown, and the operations that it selects.
  function selection() {
    const having = (wanted) => [...data.begins.keys()].filter(wanted);
    if (chosen >= 0) {
      const operation = data.operation[chosen];
      const at = data.begins[operation];
      const op = JSON.stringify(kindOf(data, operation).op);
      return { found: [operation], python: `trace.between(${ms(at)}, ${ms(at + 1)}).where(op=${op})` };
    }
    if (chosenStep >= 0) {
      const python = `trace.within(${JSON.stringify(data.spans[chosenStep])})`;
      return { found: having((operation) => data.within[operation] === chosenStep), python };
    }
    const all = window[0] <= 0 && window[1] >= data.length;
    const found = having((operation) => data.begins[operation] >= window[0] && data.begins[operation] < window[1]);
    return { found, python: all ? "trace" : `trace.between(${ms(window[0])}, ${ms(window[1])})` };
  }

  function show() {
    const style = getComputedStyle(root);
    for (const name of ["ink", "faint", "missing", "paper"]) colors[name] = style.getPropertyValue(`--${name}`);
    drawOverview();
    drawLanes();
    tell();
  }

  function drawOverview() {
    const high = Math.max(2, Math.min(12, 72 / data.lanes.length));
    const { ink, width } = sharp(overview, high * data.lanes.length + 2);
    const scale = (width - MARGIN_PX) / data.length;
    for (const [lane, from, to, shade] of data.heat) {
      const wide = Math.max(1, (to - from) * scale - 0.5);
      const box = [MARGIN_PX + from * scale, lane * high + 1, wide, high - 1];
      paint(ink, colors.ink, box, 0.12 + (0.88 * Math.max(0, shade)) / 255);
      if (shade < 0) drawStuck(ink, colors.faint, colors.missing, box);
    }
    for (const lane of data.heat.length ? [] : data.lanes.keys()) {
      drawLane(ink, data, lane, whole, [lane * high + 1, (lane + 1) * high], width, colors);
    }
    for (const operation of data.never) {
      const left = MARGIN_PX + data.begins[operation] * scale;
      const wide = Math.max(2, (data.ends[operation] - data.begins[operation]) * scale);
      for (const lane of kindOf(data, operation).absent) {
        paint(ink, colors.missing, [left, lane * high + 1, wide, high - 1]);
      }
    }
    Object.assign(ink, { strokeStyle: colors.ink, lineWidth: 2 });
    const wide = Math.max(3, (window[1] - window[0]) * scale - 1);
    ink.strokeRect(MARGIN_PX + window[0] * scale, 1, wide, high * data.lanes.length);
  }

  function drawLanes() {
    const { ink, width } = sharp(lanes, low + 20);
    const x = (at) => MARGIN_PX + ((at - window[0]) * (width - MARGIN_PX)) / (window[1] - window[0]);
    data.lanes.forEach((name, lane) => {
      const top = topOf(lane);
      paint(ink, colors.faint, [MARGIN_PX, top + 1, width, 1], 0.25);
      ink.fillStyle = colors.ink;
      if (laneHigh > 10 || lane % 8 === 0) ink.fillText(name, 0, top + laneHigh / 2 + 4, MARGIN_PX - 8);
      drawLane(ink, data, lane, window, [top + 1, top + laneHigh], width, colors);
    });
    drawNever(ink, x, width);
    if (chosen >= 0) drawChosen(ink, x);
    ink.fillStyle = colors.faint;
    for (const [title, from, to] of data.steps) {
      if (from < window[0] || from > window[1] || x(to) - x(from) < 6.5 * title.length) continue;
      ink.fillRect(x(from), 2, 0.5, low - 2);
      ink.fillText(title, x(from) + 4, 11);
    }
    if (now >= window[0] && now <= window[1]) ink.fillRect(x(now) - 1, TOP_PX, 3, low - TOP_PX);
    const [from, to] = window.map((at) => `${ms(at).toLocaleString("en-US", { maximumFractionDigits: 4 })} ms`);
    ink.fillText(from, MARGIN_PX, low + 16);
    ink.fillText(to, width - ink.measureText(to).width, low + 16);
  }

  // In the lane of each rank that never came to an operation, an empty place for as long as the others are in it.
  function drawNever(ink, x, width) {
    Object.assign(ink, { strokeStyle: colors.missing, lineWidth: flat ? 1 : 2 });
    const labelled = new Set(); // once in each row
    for (const operation of data.never) {
      if (data.begins[operation] > window[1] || data.ends[operation] < window[0]) continue;
      const left = Math.max(MARGIN_PX, x(data.begins[operation]));
      const wide = Math.max(3, Math.min(width, x(data.ends[operation])) - left - 1);
      const [other] = callsOf(operation);
      for (const lane of kindOf(data, operation).absent) {
        const top = barTop(lane, other.i);
        const box = [left, top + 1, wide, barHigh - 2];
        ink.strokeRect(...box);
        paint(ink, colors.missing, box, 0.15);
        const hasRoom = barHigh > 12 && wide > 90 && !labelled.has(top);
        if (hasRoom) ink.fillText("✖ never came", left + 6, top + barHigh / 2 + 4);
        labelled.add(top);
      }
    }
  }

  // Who sent to whom in the chosen operation: from when the sender stopped waiting to when the receiver was done.
  function drawArrows(ink, calls, x) {
    const of = new Map(calls.map(({ i, lane }) => [lane, i]));
    const { pairs } = kindOf(data, data.operation[chosen]);
    const globalAlpha = Math.max(0.15, Math.min(1, 24 / pairs.length)); // Many are a shade.
    Object.assign(ink, { fillStyle: colors.ink, globalAlpha });
    for (const [src, dst, , , how] of pairs) {
      if (src === dst || !of.has(src) || !of.has(dst)) continue;
      const [sent, got] = [of.get(src), of.get(dst)];
      const [left, right] = [x(data.start[sent] + data.waited[sent]), x(Math.min(endOf(data, got), data.length))];
      const [from, to] = [src, dst].map((lane) => barTop(lane, of.get(lane)) + barHigh / 2);
      if (left < MARGIN_PX) continue;
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
    ink.setLineDash([]);
    Object.assign(ink, { globalAlpha: 1, strokeStyle: colors.ink, lineWidth: flat ? 0.5 : 2 });
  }

  // All ranks of the chosen operation in a frame, and where the last of them came.
  function drawChosen(ink, x) {
    const calls = callsOf(data.operation[chosen]);
    Object.assign(ink, { strokeStyle: colors.ink, lineWidth: flat ? 0.5 : 2 });
    for (const { i, lane } of calls) {
      const [left, right] = [Math.max(MARGIN_PX, x(data.start[i])), x(Math.min(endOf(data, i), window[1]))];
      if (right >= left) ink.strokeRect(left - 1, barTop(lane, i), Math.max(3, right - left + 2), barHigh);
    }
    drawArrows(ink, calls, x);
    const last = x(Math.max(...calls.map(({ i }) => data.start[i])));
    if (calls.length < 2 || last < MARGIN_PX) return;
    ink.setLineDash([3, 3]);
    ink.strokeRect(last, TOP_PX, 0, low - TOP_PX);
    ink.setLineDash([]);
  }

  // Words, Python and traffic of what is chosen, or else of what is in view.
  function tell() {
    const { found, python } = selection();
    const counts = new Map();
    for (const operation of found) {
      const kind = data.kind[operation];
      counts.set(kind, (counts.get(kind) ?? 0) + 1);
    }
    const pairs = new Map();
    let [messages, bytes, unknown] = [0, 0, 0];
    for (const [kind, times] of counts) {
      unknown += data.kinds[kind].why ? times : 0;
      for (const [src, dst, size, count] of data.kinds[kind].pairs) {
        const pair = src * data.lanes.length + dst;
        pairs.set(pair, (pairs.get(pair) ?? 0) + size * times);
        messages += count * times;
        bytes += size * times;
      }
    }
    const number = (count, name) => `${count.toLocaleString("en-US")} ${name}${count === 1 ? "" : "s"}`;
    const not = unknown ? ` The messages of ${number(unknown, "operation")} are not known.` : "";
    const isInView = (begin, operation) => begin < window[1] && data.ends[operation] >= window[0];
    const seen = chosenStep >= 0 ? found.length : data.begins.filter(isInView).length;
    const begin = seen > found.length ? `, of which ${found.length} begin here` : "";
    const where = chosen >= 0 ? sentenceOf(chosen) : `${number(seen, "operation")} in view${begin}:`;
    find(".sentence").textContent = `${where} ${number(messages, "message")}, ${sizeText(bytes)} of payload.${not}`;
    find("code").textContent = python;
    drawTraffic(find(".traffic"), data, pairs, colors);
  }

  function sentenceOf(call) {
    const lane = data.first.findLastIndex((begin) => begin <= call);
    const kind = kindOf(data, data.operation[call]);
    const time = (units) => `${((units * data.unit_ns) / 1e6).toPrecision(3)} ms`;
    const later = (one, other) => (data.start[other.i] > data.start[one.i] ? other : one);
    const last = callsOf(data.operation[call]).reduce(later, { i: call, lane });
    let took = `was in it for ${time(data.took[call])}`;
    if (data.waited[call]) took += `, ${time(data.waited[call])} of it waiting for ${data.lanes[last.lane]}`;
    if (data.took[call] < 0) took = "was in it; its end was not seen";
    if (data.took[call] === STUCK) took = "never came out of it";
    return `${kind.text}: ${data.lanes[lane]} ${took}. ${kind.why || `Messages: ${kind.how}`}.`;
  }

  function look(from, to, step = -1) {
    const least = Math.min(20, data.length);
    const wide = Math.min(data.length, Math.max(least, Math.round(to - from)));
    const begin = Math.round(Math.min(Math.max(0, from), data.length - wide));
    window = [begin, begin + wide];
    chosenStep = step;
    find("select").value = step;
    show();
  }

  const middle = () => (chosen >= 0 ? data.start[chosen] : (window[0] + window[1]) / 2);
  const zoom = (by, at = middle()) => look(at - (at - window[0]) * by, at + (window[1] - at) * by);
  const pan = (share) => look(window[0] + share * (window[1] - window[0]), window[1] + share * (window[1] - window[0]));
  function timeAt(canvas, event, [from, to]) {
    const share = (event.offsetX - MARGIN_PX) / Math.max(1, canvas.clientWidth - MARGIN_PX);
    return from + share * (to - from);
  }

  function callAt(event) {
    const lane = Math.floor((event.offsetY - TOP_PX) / laneHigh);
    if (!(lane in data.lanes) || event.offsetX < MARGIN_PX) return -1;
    const [at, near] = [timeAt(lanes, event, window), (2 * (window[1] - window[0])) / lanes.clientWidth];
    const [begin, end] = inView(data, lane, [at - near, at + near]);
    for (let i = end - 1; i >= begin; i -= 1) if (endOf(data, i) >= at - near) return i;
    return -1;
  }

  function choose(call) {
    chosen = call;
    if (call >= 0 && (data.start[call] > window[1] || endOf(data, call) < window[0])) {
      const wide = window[1] - window[0];
      look(data.start[call] - wide / 2, data.start[call] + wide / 2);
    } else show();
    if (call < 0) return;
    const us = (units) => data.begin_us + (units * data.unit_ns) / 1000;
    const operation = data.operation[call];
    const detail = { at_us: us(data.begins[operation]), until_us: us(data.ends[operation]) };
    root.dispatchEvent(new CustomEvent("dlearn-call", { bubbles: true, detail }));
  }

  // From the chosen call to its neighbour in time, or to the next rank's call at that time.
  function step(by, lanesBy = 0) {
    const now = chosen >= 0 ? data.first.findLastIndex((begin) => begin <= chosen) : 0;
    const lane = Math.max(0, Math.min(data.lanes.length - 1, now + lanesBy));
    const [first, last] = [data.first[lane], data.first[lane + 1] - 1];
    const at = chosen >= 0 ? data.start[chosen] : window[0];
    const call = chosen >= 0 && !lanesBy ? chosen + by : bisect(data.start, first, last + 1, at);
    if (last >= first) choose(Math.max(first, Math.min(last, call)));
  }

  let drag = null;
  for (const [canvas, span] of [[overview, () => whole], [lanes, () => window]]) {
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      drag = { canvas, from: timeAt(canvas, event, span()), window, moved: false };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag?.canvas !== canvas) {
        const call = canvas === lanes ? callAt(event) : -1;
        if (call >= 0 && chosen < 0) find(".sentence").textContent = sentenceOf(call);
        return;
      }
      const at = timeAt(canvas, event, canvas === overview ? whole : drag.window);
      drag.moved ||= Math.abs(at - drag.from) * canvas.clientWidth > 3 * (span()[1] - span()[0]);
      if (!drag.moved) return;
      if (canvas === overview) look(Math.min(at, drag.from), Math.max(at, drag.from));
      else look(drag.window[0] + drag.from - at, drag.window[1] + drag.from - at);
    });
    canvas.addEventListener("pointerup", (event) => {
      const { moved, from } = drag ?? { moved: true };
      drag = null;
      if (moved) return;
      if (canvas === lanes) choose(callAt(event));
      else look(from - (window[1] - window[0]) / 2, from + (window[1] - window[0]) / 2);
    });
    canvas.addEventListener("pointerleave", () => drag || tell());
  }
  lanes.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / 1000);
    else zoom(event.deltaY > 0 ? ZOOM : 1 / ZOOM, timeAt(lanes, event, window));
  }, { passive: false });
  const keys = {
    ArrowLeft: () => pan(-0.2),
    ArrowRight: () => pan(0.2),
    ArrowUp: () => step(0, -1),
    ArrowDown: () => step(0, 1),
    "+": () => zoom(1 / ZOOM),
    "=": () => zoom(1 / ZOOM),
    "-": () => zoom(ZOOM),
    n: () => step(1),
    p: () => step(-1),
    Home: () => look(...whole),
    Escape: () => choose(-1),
  };
  lanes.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const button of root.querySelectorAll("[data-key]")) button.addEventListener("click", () => keys[button.dataset.key]());
  find(".copy").addEventListener("click", () => navigator.clipboard?.writeText(find("code").textContent));
  const steps = find("select");
  steps.add(new Option("whole run", -1));
  data.steps.forEach(([title], place) => steps.add(new Option(title, place)));
  steps.hidden = !data.steps.length;
  steps.addEventListener("change", () => {
    chosen = -1;
    const [, from, to, span] = data.steps[steps.value] ?? ["", ...whole, -1];
    look(from, to, span);
  });
  const legend = find(".legend");
  data.colors.forEach((color, i) => add(legend, "span", { style: `--color: ${color}` }, data.legend[i]));
  const hatched = data.never.length ? "; hatched: for one that never came (red)" : "";
  add(legend, "i", {}, `thin: waits for the last rank${hatched}`);
  document.addEventListener("dlearn-step", ({ detail }) => {
    now = detail.at_us ? ((detail.at_us - data.begin_us) * 1000) / data.unit_ns : -1;
    show();
  });
  new ResizeObserver(show).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  root.dlearnStrip = { look, choose, data, get window() { return window; }, get found() { return selection().found; } };
  show();
}

mountAll("strip", (root, facts) => {
  root.querySelector(".still")?.remove();
  root.querySelector(".travel").hidden = false;
  mountStrip(root, indexed(facts));
});
