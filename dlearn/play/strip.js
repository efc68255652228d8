// The strip: every call of every rank over time. Above stands the whole run, with a frame around the part that the
// lanes below show: call by call (strip_calls.js), or, where these are too many, as shares of the time (strip_run.js).

const LANES_PX = 320;
const LENGTHS_PX = 48; // for the lengths of steps
const DENSE_PX = 4; // for a call in a lane: with less they are shown as shares
const ZOOM = 1.35;

function mountStrip(root, facts) {
  const data = indexed(facts);
  const find = (selector) => root.querySelector(selector);
  find(".still")?.remove();
  find(".travel").hidden = false;
  const [overview, lanes, steps] = [find(".overview"), find(".lanes"), find("select")];
  const [whole, count] = [[0, data.length], data.lanes.length];
  const laneHigh = Math.max(6, Math.min(70, LANES_PX / count));
  const topOf = (lane) => TOP_PX + laneHigh * lane;
  const low = topOf(count);
  const margin = Math.min(92, 14 + 6.2 * Math.max(10, ...data.lanes.map((name) => name.length))); // for the names of lanes
  const awaitedHigh = data.awaited.length ? Math.max(3, Math.min(12, 96 / count)) : 0;
  const ruler = low + (awaitedHigh ? 27 : 6) + awaitedHigh * count;
  let window = whole;
  let chosenStep = -1; // only what is in this span counts
  let chosen = -1; // a call
  let now = -1; // the time of the step that a player on this page shows
  let [columns, dense] = [[], false]; // of steps that are too narrow to be shown call by call; calls that are
  const colors = {};

  // Where shares are shown, a call has all of its lane.
  function placeOf(lane, call) {
    return dense ? [topOf(lane), laneHigh] : barOf(data, call, [topOf(lane) + 1, topOf(lane + 1)]);
  }

  const ms = (units) => Number(((units * data.unit_ns) / 1e6).toFixed(6));
  const laneOf = (call) => data.first.findLastIndex((begin) => begin <= call);
  const callsOf = (operation) => data.lanes.map((_, lane) => ({ lane, i: data.operation.indexOf(operation, data.first[lane]) }))
    .filter(({ lane, i }) => i >= 0 && i < data.first[lane + 1]);

  // The Python that selects what is shown, and the operations that it selects.
  function selection() {
    const [operation, [from, to]] = [data.operation[chosen], window];
    const at = data.begins[operation];
    const op = chosen >= 0 && JSON.stringify(kindOf(data, operation).op);
    if (op) return { found: [operation], python: `trace.between(${ms(at)}, ${ms(at + 1)}).where(op=${op})` };
    const isIn = (each) => (chosenStep < 0 ? data.begins[each] >= from && data.begins[each] < to : data.within[each] === chosenStep);
    let python = from <= 0 && to >= data.length ? "trace" : `trace.between(${ms(from)}, ${ms(to)})`;
    if (chosenStep >= 0) python = `trace.within(${JSON.stringify(data.spans[chosenStep])})`;
    return { found: [...data.begins.keys()].filter(isIn), python };
  }

  function show() {
    if (!root.clientWidth) return; // It is hidden.
    const style = getComputedStyle(root);
    for (const name of ["ink", "faint", "missing", "paper"]) colors[name] = style.getPropertyValue(`--${name}`).trim();
    colors.night = Number(colors.paper !== "#fff");
    drawOverview();
    drawLanes();
    for (const [name, is] of [["night", colors.night], ["shares", columns.length], ["dense", dense]]) root.classList.toggle(name, is);
    tell();
  }

  const countIn = (view) => (_, lane) => inView(data, lane, view.window).reduce((begin, end) => end - begin);
  const isDense = (view) => Math.max(...data.lanes.map(countIn(view))) * DENSE_PX > view.width;
  function drawLane(view, lane, box) {
    if (isDense(view)) drawColumns(view, callColumns(data, lane, view), box);
    else drawBars(view, data, lane, box);
  }

  function drawOverview() {
    const high = data.isRun ? LENGTHS_PX / count : Math.max(2, Math.min(12, 72 / count));
    const view = drawing(overview, high * count + 2, whole, margin, colors);
    if (data.isRun) drawLengths(view, data, LENGTHS_PX);
    else for (const lane of data.lanes.keys()) drawLane(view, lane, [lane * high + 1, (lane + 1) * high]);
    if (!data.isRun) drawNever(view, data, (lane) => [lane * high, high]);
    const [left, right] = window.map(view.x);
    for (const [from, to] of [[margin, left], [right, view.width]]) paint(view, colors.paper, [from, 0, to - from, high * count], 0.6);
    Object.assign(view.ink, { strokeStyle: colors.ink, lineWidth: 1.5 });
    view.ink.strokeRect(left + 1, 1, Math.max(3, right - left - 2), high * count);
  }

  function drawLanes() {
    const view = drawing(lanes, ruler + 22, window, margin, colors);
    const { ink, x, width, scale } = view;
    columns = data.areShares && data.median * scale < STEP_PX ? columnsOf(data, view) : [];
    dense = columns.length > 0 || isDense(view);
    const gap = laneHigh > FLAT_PX ? 4 : 0.5;
    for (const lane of data.lanes.keys()) {
      const box = [topOf(lane) + (dense ? gap : 1), topOf(lane + 1)];
      const shares = columns.map((column) => stepColumn(data, lane, column, colors.night));
      if (columns.length) drawColumns(view, shares, box);
      else drawLane(view, lane, box);
      if (gap > 1) paint(view, colors.faint, [margin, topOf(lane + 1), width, 1], 0.4);
    }
    drawNames(view, data, TOP_PX, laneHigh, (lane) => lane % 8 === 0);
    drawNever(view, data, placeOf);
    if (chosen >= 0 && !dense) drawChosen(view, data, callsOf(data.operation[chosen]), placeOf, low);
    let free = margin;
    for (const [title, from, to, , length] of columns.length ? [] : data.steps) {
      if (from < window[0] || from > window[1]) continue;
      const endOf = (text) => x(from) + ink.measureText(text).width + 4;
      const longer = `${title}, ${timeText(length * data.unit_ns)}`;
      const text = data.isTimed && length >= 0 && endOf(longer) < x(to) ? longer : title;
      const hasRoom = x(from) >= free && x(to) - x(from) >= STEP_PX && endOf(text) < width;
      paint(view, colors.faint, [x(from), hasRoom ? 2 : TOP_PX, 0.5, low - (hasRoom ? 2 : TOP_PX)]);
      if (hasRoom) write(view, text, x(from) + 4, 11, colors.faint);
      if (hasRoom) free = endOf(text) + 8;
    }
    if (now >= window[0] && now <= window[1]) paint(view, colors.ink, [x(now) - 1, TOP_PX, 3, low - TOP_PX]);
    const shown = columns.length || !awaitedHigh ? columns : columnsOf(data, { window, scale: Infinity });
    if (awaitedHigh) drawAwaited(view, data, shown, low, awaitedHigh);
    drawRuler(view, data, ruler);
  }

  // Words and Python of what is chosen, or else of what is in view.
  function tell() {
    const { found, python } = selection();
    const counts = new Map();
    for (const operation of found) counts.set(data.kind[operation], (counts.get(data.kind[operation]) ?? 0) + 1);
    let [messages, bytes, unknown] = [0, 0, 0];
    for (const [kind, times] of counts) {
      unknown += data.kinds[kind].why ? times : 0;
      for (const [, , size, number] of data.kinds[kind].pairs) {
        messages += number * times;
        bytes += size * times;
      }
    }
    const number = (many, name) => `${many.toLocaleString("en-US")} ${name}${many === 1 ? "" : "s"}`;
    const not = unknown ? ` The messages of ${number(unknown, "operation")} are not known.` : "";
    const isInView = (begin, operation) => begin < window[1] && data.ends[operation] >= window[0];
    const seen = chosenStep >= 0 ? found.length : data.begins.filter(isInView).length;
    const begin = seen > found.length ? `, of which ${found.length} begin here` : "";
    const where = chosen >= 0 ? sentenceOf(chosen) : `${number(seen, "operation")} in view${begin}:`;
    find(".sentence").textContent = `${where} ${number(messages, "message")}, ${sizeText(bytes)} of payload.${not}`;
    find("code").textContent = python;
  }

  function sentenceOf(call) {
    const kind = kindOf(data, data.operation[call]);
    const time = (units) => timeText(units * data.unit_ns);
    const later = (one, other) => (data.start[other.i] > data.start[one.i] ? other : one);
    const last = callsOf(data.operation[call]).reduce(later, { i: call, lane: laneOf(call) });
    let took = `was in it for ${time(data.took[call])}`;
    if (data.waited[call]) took += `, ${time(data.waited[call])} of it waiting for ${data.lanes[last.lane]}`;
    if (data.took[call] < 0) took = "was in it; its end was not seen";
    if (data.took[call] === STUCK) took = "never came out of it";
    return `${kind.text}: ${data.lanes[laneOf(call)]} ${took}. ${kind.why || `Messages: ${kind.how}`}.`;
  }

  function look(from, to, step = -1) {
    const wide = Math.min(data.length, Math.max(Math.min(20, data.length), Math.round(to - from)));
    const begin = Math.round(Math.min(Math.max(0, from), data.length - wide));
    window = [begin, begin + wide];
    chosenStep = steps.value = step;
    show();
  }

  function lookAtStep(step) {
    chosen = -1;
    const [, from, to, span, length] = data.steps[step] ?? ["", ...whole, -1, 0];
    look(from, length < 0 ? data.length : to, span);
    steps.value = step;
  }

  const middle = () => (chosen >= 0 ? data.start[chosen] : (window[0] + window[1]) / 2);
  const zoom = (by, at = middle()) => look(at - (at - window[0]) * by, at + (window[1] - at) * by);
  const pan = (share) => look(...window.map((at) => at + share * (window[1] - window[0])));
  const timeAt = (canvas, { offsetX }, [from, to]) => from + ((offsetX - margin) / Math.max(1, canvas.clientWidth - margin)) * (to - from);

  // The call under the pointer, or the column of steps: in words, and what a click does.
  function under(event) {
    const [lane, at] = [Math.floor((event.offsetY - TOP_PX) / laneHigh), timeAt(lanes, event, window)];
    const none = { text: "", open: () => choose(-1) };
    if (!(lane in data.lanes) || event.offsetX < margin) return none;
    const column = columns.findLast(({ from }) => from <= at);
    if (column) {
      const name = (step) => data.steps[step][0];
      const steps = column.after > column.step + 1 ? `${name(column.step)} to ${name(column.after - 1)}` : name(column.step);
      const shares = stepColumn(data, lane, column, 0).parts.map(([, share]) => `${Math.round(100 * share)}%`);
      const did = shares.length ? `computes ${shares[0]}, sends unhidden ${shares[1]}, waits for the last rank ${shares[2]}` : "was not seen";
      return { text: `${steps}: ${data.lanes[lane]} ${did}.`, open: () => look(column.from, column.to) };
    }
    const near = (2 * (window[1] - window[0])) / lanes.clientWidth;
    const [begin, end] = inView(data, lane, [at - near, at + near]);
    for (let i = end - 1; i >= begin; i -= 1) if (endOf(data, i) >= at - near) return { text: sentenceOf(i), open: () => choose(i) };
    return none;
  }

  function choose(call) {
    chosen = call;
    const half = columns.length ? 2 * data.median : (window[1] - window[0]) / 2;
    if (call < 0 || (!columns.length && data.start[call] <= window[1] && endOf(data, call) >= window[0])) show();
    else look(data.start[call] - half, data.start[call] + half);
    if (call < 0) return;
    const us = (units) => data.begin_us + (units * data.unit_ns) / 1000;
    const detail = { at_us: us(data.begins[data.operation[call]]), until_us: us(data.ends[data.operation[call]]) };
    root.dispatchEvent(new CustomEvent("dlearn-call", { bubbles: true, detail }));
  }

  // From the chosen call to its neighbour in time, or to the next rank's call at that time.
  function step(by, lanesBy = 0) {
    const lane = Math.max(0, Math.min(count - 1, (chosen >= 0 ? laneOf(chosen) : 0) + lanesBy));
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
        const text = canvas === lanes && chosen < 0 && under(event).text;
        if (text) find(".sentence").textContent = text;
        return;
      }
      const at = timeAt(canvas, event, canvas === overview ? whole : drag.window);
      drag.moved ||= Math.abs(at - drag.from) * canvas.clientWidth > 3 * (span()[1] - span()[0]);
      if (!drag.moved) return;
      if (canvas === overview) look(Math.min(at, drag.from), Math.max(at, drag.from));
      else look(...drag.window.map((each) => each + drag.from - at));
    });
    canvas.addEventListener("pointerup", (event) => {
      const { moved, from } = drag ?? { moved: true };
      drag = null;
      if (moved) return;
      if (canvas === overview) look(from - (window[1] - window[0]) / 2, from + (window[1] - window[0]) / 2);
      else under(event).open();
    });
    canvas.addEventListener("pointerleave", () => drag || tell());
  }
  lanes.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / 1000);
    else zoom(event.deltaY > 0 ? ZOOM : 1 / ZOOM, timeAt(lanes, event, window));
  }, { passive: false });
  const keys = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
    "+": () => zoom(1 / ZOOM), "=": () => zoom(1 / ZOOM), "-": () => zoom(ZOOM), n: () => step(1), p: () => step(-1),
    Home: () => look(...whole), Escape: () => choose(-1),
  };
  lanes.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const button of root.querySelectorAll("[data-key]")) button.addEventListener("click", () => keys[button.dataset.key]());
  find(".copy").addEventListener("click", () => navigator.clipboard?.writeText(find("code").textContent));
  steps.addEventListener("change", () => lookAtStep(Number(steps.value)));
  for (const button of root.querySelectorAll("[data-step]")) button.addEventListener("click", () => lookAtStep(Number(button.dataset.step)));
  document.addEventListener("dlearn-step", ({ detail }) => {
    now = detail.at_us ? ((detail.at_us - data.begin_us) * 1000) / data.unit_ns : -1;
    show();
  });
  new ResizeObserver(show).observe(root);
  new MutationObserver(show).observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  root.dlearnStrip = { look, choose, data, get window() { return window; }, get found() { return selection().found; } };
  show();
}

mountAll("strip", mountStrip);
