// The stage: ranks as machines, and packets that move along the wires between them. Python says where ranks stand
// (packing.py). A box shows what its rank holds of the operation under way: a column for each piece, a band for each
// rank whose part is in it, gold once it is whole. Of many ranks one grid in the middle shows all that they hold.

const MOVE_MS = 650;
const MOST_BANDS = 8; // ranks with a band each; of more, a cell is the stronger, the more of it is there
const MOST_BOXES = 16; // ranks with a box that holds something
const SMALL = 34; // a box that has room for its number only
const HEAD = 19; // above a box, for its name, and below, for what its rank does
const MOST_GAPS = 32; // columns of a grid that stand apart

function addStage(parent, stage, id, below, label) {
  fit(stage, parent.clientWidth);
  const viewBox = `0 0 ${stage.width} ${stage.height + below}`;
  return addSvg(parent, id, { class: "stage", width: "100%", viewBox, "aria-label": label });
}

// On a narrow page boxes shrink less than the gaps between them, and none moves up or down.
function fit(stage, width) {
  const given = (stage.given ??= { ...stage });
  stage.width = Math.min(given.width, width || given.width);
  const size = Math.min(1, (given.wide > SMALL ? 0.15 : 0) + stage.width / given.width);
  [stage.wide, stage.high] = [given.wide * size, given.high * Math.max(size, 0.75)];
  const narrower = (stage.width - stage.wide - 10) / (given.width - given.wide - 10);
  stage.spots = given.spots.map(([x, y]) => [stage.width / 2 + (x - given.width / 2) * narrower, y]);
  stage.bottom = Math.max(0, ...stage.spots.map((spot) => spot[1]));
  stage.height = Math.round(stage.bottom + stage.high / 2 + HEAD + 5);
  for (const wire of stage.wires) wire.ends = rims(stage, wire);
  const lengths = stage.wires.map(({ ends: [[x, y], [toX, toY]] }) => Math.hypot(toX - x, toY - y));
  stage.packet = Math.min(34, 0.45 * stage.wide, Math.max(11, 0.5 * Math.min(...lengths)));
}

// Both ends of a wire, at the rims of two boxes; beside the middle if packets go both ways.
function rims({ spots, wires, wide, high, width, bottom }, { src, dst }) {
  const middle = [width / 2, (Math.min(...spots.map((spot) => spot[1])) + bottom) / 2]; // of all ranks
  const [[x, y], [toX, toY]] = [spots[src], spots[dst] ?? middle];
  const far = Math.hypot(toX - x, toY - y) || 1;
  const [across, down] = [(toX - x) / far, (toY - y) / far];
  const above = wide < SMALL ? 2 : HEAD;
  const rim = Math.min((wide / 2 + 3) / Math.abs(across), (high / 2 + above) / Math.abs(down), far / 2);
  const beside = wires.some((other) => other.src === dst && other.dst === src) ? 6 : 0;
  const along = (part) => [x + across * part - down * beside, y + down * part + across * beside];
  return [along(rim), dst < 0 ? middle : along(far - rim)];
}

function addWire(svg, id, [from, to], state) {
  const ends = { x1: from[0], y1: from[1], x2: to[0], y2: to[1] };
  add(svg, "line", { class: `wire ${state}`, ...ends, "marker-end": `url(#${id}head)` });
}

// The panel in the boxes: of the operation under way, or of the next one once a rank works towards it.
function panelOnStage({ changes, steps, panels }, until) {
  const ofOne = (rows) => rows.find(([panel]) => !panels[panel].lasting);
  const begun = changes.findLastIndex((rows, step) => step <= until && ofOne(rows));
  const coming = changes.findIndex((rows, step) => step > until && ofOne(rows));
  const [before, next] = [begun, coming].map((step) => (step < 0 ? -1 : ofOne(changes[step])[0]));
  const isWork = ({ dst }, i) => dst < 0 && changes[begun + 1 + i].length;
  const works = steps.slice(begun + 1, until + 1).some(isWork);
  if (before >= 0 && (next < 0 || next === before || !works)) return { panel: before, isReady: true };
  const isReady = !steps.slice(until + 1, Math.max(coming, 0)).some(({ dst }) => dst < 0);
  return { panel: next < 0 ? panels.findIndex(({ lasting }) => lasting) : next, isReady };
}

// For each lane its cells; before the data exist, as much of DDP's bucket as is ready; in a hang, a rank's own part.
function heldOnStage(data, { panel, isReady }, until, now) {
  if (isReady) return panel < 0 ? data.lanes.map(() => new Map()) : heldOn(data, panel, until);
  const lasting = now?.hung ? -1 : data.panels.findIndex((each) => each.lasting);
  const filling = lasting < 0 ? [] : heldOn(data, lasting, until);
  return data.lanes.map((_, lane) => {
    let part = filling[lane]?.get(data.calls[data.panels[panel].call].bucket);
    if (now?.hung?.[0].includes(lane)) part = ["its own part", 0.5];
    return new Map(part && [[0, [part[0], Math.min(1, 2 * part[1]), [lane]]]]);
  });
}

function drawCells(box, held, data, { panel, isReady, color }) {
  box.replaceChildren();
  const { lanes, whole, panels, stage: { wide, high } } = data;
  const cells = [...held].sort(([a], [b]) => a - b);
  if (panels[panel]?.lasting) return drawWords(box, cells.map(([, [text]]) => text), data.stage);
  const room = (wide - 12) / cells.length;
  cells.forEach(([, [text, share, owners]], number) => {
    const cell = add(box, "g", { class: "cell" });
    const [x, y, width, height] = [6 - wide / 2 + room * number, 6 - high / 2, room - (room > 4 ? 1.5 : 0), high - 12];
    add(add(cell, "rect", { class: "slot", x, y, width, height }), "title", {}, text || "nothing");
    const put = (more) => add(cell, "rect", { x, y, width, height, fill: color, ...more });
    const band = height / lanes.length;
    if (isReady && share === 1) put({ class: "whole", fill: whole });
    else if (lanes.length > MOST_BANDS) put({ opacity: isReady ? share : 0.25 });
    else {
      const size = { width: width * (isReady ? 1 : share), height: band - 1 };
      for (const owner of owners) put({ y: y + band * owner, ...size });
    }
  });
}

// What a rank keeps or does, in as many lines as fit; micro-batches by their numbers, side by side.
function drawWords(box, words, { wide, high }) {
  const room = { x: 4 - wide / 2, y: 4 - high / 2, width: wide - 8, height: high - 8 };
  const list = document.createElement("ul");
  add(box, "foreignObject", room).append(list);
  const [texts, isNumber] = [words.filter(Boolean), (text) => text.startsWith("micro-batch ")];
  const beside = texts.every(isNumber) ? Math.floor(room.width / 21) : 1; // as in player.css
  const most = beside * Math.floor(high / 18) - 1;
  if (texts.length > most + 1) texts.splice(most, Infinity, beside > 1 ? "…" : `and ${texts.length - most} more`);
  for (const text of texts) add(list, "li", { title: text, class: isNumber(text) ? "number" : "" }, text.replace("micro-batch ", ""));
}

// A row for each rank, a column for each piece; where each sends to each, a row for each sender, and no ranks around it.
function drawGrid(group, held, { lanes, whole, stage }, { color, isMatrix, message }) {
  group.replaceChildren();
  const columns = isMatrix ? lanes.length : 1 + Math.max(0, ...held.flatMap((pieces) => [...pieces.keys()]));
  const canvas = document.createElement("canvas");
  const [px, gap] = columns > MOST_GAPS ? [1, 0] : [16, 1];
  [canvas.width, canvas.height] = [columns * px, lanes.length * px];
  const ink = canvas.getContext("2d");
  held.forEach((pieces, lane) => {
    for (let at = 0; at < columns; at += 1) {
      const share = pieces.get(at)?.[1] ?? 0;
      ink.globalAlpha = 0.08 + 0.92 * share;
      ink.fillStyle = share === 1 ? whole : color;
      const [column, row] = isMatrix ? [lane, at] : [at, lane];
      ink.fillRect(column * px, row * px, px - gap, px - gap);
    }
  });
  const middle = (stage.spots[0][1] + stage.bottom) / 2;
  const width = isMatrix ? stage.matrix : 1.2 * (stage.width / 2 - 2 * stage.wide);
  const height = isMatrix ? width : 1.32 * (middle - 2 * stage.high);
  const [x, y] = [(stage.width - width) / 2 + (isMatrix ? HEAD : 0), isMatrix ? HEAD + 14 : middle - height / 2];
  const high = height / lanes.length;
  add(group, "image", { class: "heat", href: canvas.toDataURL(), x, y, width, height, preserveAspectRatio: "none" });
  const every = [1, 4, 16, 64].find((each) => each * high >= 15) ?? 256;
  for (let lane = 0; lane < lanes.length; lane += every) {
    add(group, "text", { x: x - 10, y: y + high * (lane + 0.5) + 4 }, lane);
    if (isMatrix) add(group, "text", { x: x + high * (lane + 0.5), y: y - 5 }, lane);
  }
  if (!isMatrix) return;
  add(group, "text", { class: "name", x: x + width / 2, y: y - HEAD }, "to rank");
  add(group, "text", { class: "name", transform: `translate(${x - 26} ${y + height / 2}) rotate(-90)` }, "from rank");
  if (message) add(group, "rect", { class: "frame", x: x + high * message.dst, y: y + high * message.src, width: high, height: high });
}

function drawStage(parent, { data, id, current, moved, speed }) {
  const { stage, lanes, steps, calls, panels } = data;
  const svg = addStage(parent, stage, id, 0, "Ranks and the wires between them; each step is told in words");
  const now = steps[current];
  const shown = moved.length || !now ? moved : [current];
  const all = shown.map((number) => ({ ...steps[number], color: data.shade(steps[number].color), changes: data.changes[number] }));
  const sent = all.filter(({ src, dst }) => dst >= 0 && dst !== src);
  const on = now?.hung ? { panel: -1, isReady: false } : panelOnStage(data, current ?? -1);
  const call = calls[panels[on.panel]?.call];
  on.color = data.shade(call?.color ?? now?.color);
  on.isMatrix = call?.family === "all_to_all" && lanes.length > MOST_BANDS;
  if (sent.length === 1) [on.message] = sent;
  stage.matrix = Math.min(stage.width - 50, 420);
  if (on.isMatrix) svg.setAttribute("viewBox", `0 0 ${stage.width} ${stage.matrix + 40}`);
  const hasGrid = call && (on.isMatrix || lanes.length > MOST_BOXES || stage.wide < SMALL);
  const after = heldOnStage(data, on, current ?? -1, now);
  const before = heldOnStage(data, on, (shown[0] ?? 0) - 1, now);
  const labels = add(svg, "g");
  if (!on.isMatrix) drawWires(labels, id, stage, now, sent);
  const runs = (lane) => ({ src, dst, hung, until }, number) => {
    return src === lane && dst < 0 && !hung && (number === current || (number < current && until > now.at));
  };
  const boxes = (on.isMatrix ? [] : lanes).map((name, lane) => {
    return drawBox(svg, name, lane, { stage, now, sent, own: steps.findLast(runs(lane)) });
  });
  const grid = add(svg, "g");
  const fill = (held) => {
    if (hasGrid) drawGrid(grid, held, data, on);
    else if (stage.wide >= SMALL) boxes.forEach((box, lane) => drawCells(box, held[lane], data, on));
  };
  fill(after);
  const drawn = on.isMatrix ? [] : sent.map((step) => {
    const ats = step.changes.filter(([panel]) => panel === on.panel).map(([, , at]) => at);
    const isWhole = call && ats.length && ats.every((at) => before[step.src].get(at)?.[1] === 1);
    const { ends } = wireOf(stage, step.src, step.dst);
    if (sent.length <= MOST_BANDS) addLabel(labels, stage, ends, step);
    return [drawPacket(svg, step, data, isWhole ? [data.whole] : []), ends, step.how === "missing"];
  });
  if (!moved.length || isCalm() || drawn.some(([, , isMissing]) => isMissing)) {
    drawn.forEach(([packet, ends, isMissing]) => put(packet, ends, isMissing ? 0.12 : 0.5));
  } else if (sent.length) {
    move(svg, speed, (part) => {
      drawn.forEach(([packet, ends]) => put(packet, ends, part));
      if (part && part < 1 && !on.isMatrix) return;
      const came = part < 1 ? sent.slice(0, part * sent.length) : [];
      for (const [, lane, at, ...cell] of came.flatMap(({ changes }) => changes)) before[lane].set(at, cell);
      fill(part < 1 ? before : after);
    });
  }
  return on.panel;
}

// The words of a packet stand above the middle of its wire, outwards of a steep one, unless they
// would lie on a box or stand there already.
function addLabel(parent, { spots, wide, high, width, height }, [[x, y], [toX, toY]], step) {
  const never = step.how === "missing" ? "never came: " : "";
  const text = `${step.mark} · ${never}${sizeText(step.bytes)}`;
  const half = 3.3 * text.length;
  const aside = Math.max(0, half + 6 - Math.abs((16 * (toX - x)) / (toY - y)));
  const middle = (x + toX) / 2 + aside * Math.sign(x + toX - width);
  const above = aside && y + toY > height ? -22 : 16;
  const at = { x: Math.max(half, Math.min(width - half, middle)), y: (y + toY) / 2 - above };
  const isOn = ([u, v]) => Math.abs(at.x - u) < half + wide / 2 && Math.abs(at.y - 4 - v) < high / 2 + HEAD + 4;
  const isThere = [...parent.querySelectorAll("text")].some(({ textContent }) => textContent === text);
  if (at.x && !isThere && !spots.some(isOn)) add(parent, "text", { class: `label ${step.how}`, ...at }, text);
}

const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const wireOf = ({ wires }, from, to) => wires.find(({ src, dst }) => src === from && dst === to);

function drawWires(svg, id, stage, now, sent) {
  for (const { src, dst, ends } of stage.wires) {
    const used = sent.find((step) => step.src === src && step.dst === dst);
    const never = now?.hung?.[2].some(([from, to]) => from === src && to === dst);
    const state = never || used?.how === "missing" ? "missing" : used && `used ${used.how}`;
    addWire(svg, id, ends, state ?? "");
  }
}

// A rank's box, with its name, and what the rank does by itself; returns what holds its cells.
function drawBox(svg, name, lane, { stage, now, sent, own }) {
  const { wide, high } = stage;
  const [x, y] = stage.spots[lane];
  const [waits, isAbsent] = (now?.hung ?? [[], []]).map((lanes) => lanes.includes(lane));
  const active = now && !now.hung && [now, ...sent].some(({ src, dst }) => src === lane || dst === lane);
  const state = `${isAbsent ? "absent" : ""} ${waits || active ? "at" : ""}`;
  const machine = add(svg, "g", { class: `machine ${state}`, transform: `translate(${x} ${y})` });
  add(machine, "rect", { class: "box", x: -wide / 2, y: -high / 2, width: wide, height: high, rx: 5 });
  const inside = add(machine, "g");
  const isSmall = wide < SMALL;
  const above = { class: "name", y: isSmall ? 4 : -high / 2 - 6 };
  const isNamed = !isSmall || wide > 14 || lane % 4 === 0;
  const text = add(machine, "text", above, isSmall ? String(isNamed ? lane : "") : shortened(name, wide / 6.2));
  add(text, "title", {}, name);
  let [does, words] = own ? ["works", own.mark] : ["", ""];
  if (waits) [does, words] = ["waits", "waits"];
  if (isAbsent) [does, words] = ["absent", "never came"];
  if (isSmall || !does) return inside; // The step's sentence says it of all.
  const foot = { x: -wide / 2, y: high / 2 + 2, width: wide, height: HEAD - 4, rx: 3 };
  add(machine, "rect", { class: does, ...foot, fill: does === "works" ? own.color : "none" });
  const hatches = [...Array(Math.floor(wide / 6) - 2).keys()].map((i) => `M${6 * i - wide / 2} ${high / 2 + 17}l15-15`);
  if (waits) add(machine, "path", { class: "hatches", d: hatches.join("") });
  add(machine, "text", { class: `work on-${does}`, y: high / 2 + 13 }, shortened(words, wide / 6.2));
  return inside;
}

// A name is cut in the middle: names mostly differ at an end.
function shortened(name, most) {
  const room = Math.max(3, Math.floor(most));
  if (name.length <= room) return name;
  const head = Math.ceil((room - 1) / 2);
  return `${name.slice(0, head)}…${name.slice(name.length - (room - 1 - head))}`;
}

// `inner`: the colour of what is whole in it.
function drawPacket(svg, step, data, inner) {
  const side = Math.min(data.stage.packet, 10 + 3 * Math.log10(1 + (step.bytes ?? 0)));
  const packet = add(svg, "g", { class: `packet ${step.how}` });
  [step.color, ...inner].forEach((fill, i) => {
    const size = side * (i ? 0.6 : 1);
    add(packet, "rect", { x: -size / 2, y: -size / 2, width: size, height: size, rx: 2, fill });
  });
  return packet;
}

function put(packet, [[x, y], [toX, toY]], along) {
  packet.setAttribute("transform", `translate(${x + (toX - x) * along} ${y + (toY - y) * along})`);
}

// Calls `at` for each frame, with the part of the way from 0 to 1.
function move(svg, speed, at) {
  let begun = null;
  const frame = (time) => {
    if (!svg.isConnected) return;
    begun ??= time;
    const part = Math.min(1, ((time - begun) * speed) / MOVE_MS);
    at(part < 0.5 ? 2 * part * part : 1 - 2 * (1 - part) ** 2);
    if (part < 1) requestAnimationFrame(frame);
  };
  at(0);
  requestAnimationFrame(frame);
}
