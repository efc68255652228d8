// The stage: ranks as machines, and packets that move along the wires between them. Python has placed both
// (packing.py). A box shows what its rank holds of the operation under way: a column for each piece, a colour
// for each rank whose part is in it. Of many ranks one grid in the middle shows all that they hold.

const MOVE_MS = 650;
const MOST_COLORS = 8; // ranks that have a colour each; of more, cells show how much is there
const MOST_BOXES = 16; // ranks with a box that holds something
const SMALL = 40; // a box that has room for its number only

function addStage(parent, stage, id, below, label) {
  const viewBox = `0 0 ${stage.width} ${stage.height + below}`;
  return addSvg(parent, id, { class: "stage", width: "100%", viewBox, "aria-label": label });
}

function addWire(svg, id, [from, to], state) {
  const ends = { x1: from[0], y1: from[1], x2: to[0], y2: to[1] };
  add(svg, "line", { class: `wire ${state}`, ...ends, "marker-end": `url(#${id}head)` });
}

// The panel that is shown: of the operation under way, or the next one's, once no rank works towards it.
function panelOnStage(data, until) {
  const recent = recentPanel(data, until);
  const changesIt = (changes) => changes.some(([panel]) => panel === recent);
  const begins = Math.max(data.changes.findIndex(changesIt), 0);
  const works = data.steps.slice(until + 1, begins).some(({ dst }) => dst < 0);
  return recent < 0 || works ? data.panels.findIndex(({ lasting }) => lasting) : recent;
}

// A rank that waits in an operation that never ran holds its own part, and nothing else.
function ownParts(data, now) {
  const waiting = now?.hung?.[0] ?? [];
  const part = (lane) => [0, ["its own part", 1 / data.lanes.length, [lane]]];
  return data.lanes.map((_, lane) => new Map(waiting.includes(lane) ? [part(lane)] : []));
}

function drawCells(box, held, data, panel) {
  box.replaceChildren();
  const lasting = data.panels[panel]?.lasting; // It has words, one below the other.
  const cells = [...held].filter(([, [text]]) => text || !lasting).sort(([a], [b]) => a - b);
  const { wide, high } = data.stage;
  const width = (wide - 12) / (lasting ? 1 : cells.length);
  const height = (high - 12) / (lasting ? cells.length : 1);
  const gap = Math.min(width, height) > 4 ? 1.5 : 0;
  cells.forEach(([, [text, share, owners]], number) => {
    const cell = add(box, "g", { class: "cell" });
    const x = 6 - wide / 2 + (lasting ? 0 : width * number);
    const y = 6 - high / 2 + (lasting ? height * number : 0);
    const inner = { x, y, width: width - gap, height: lasting ? height - gap : height };
    add(add(cell, "rect", { class: "slot", ...inner }), "title", {}, text || "nothing");
    if (lasting) {
      add(cell, "rect", { class: "share", ...inner, opacity: share });
      const fits = width > 5.6 * text.length && height > 12;
      if (fits) add(cell, "text", { x: x + width / 2, y: y + height / 2 + 4 }, text);
    } else if (data.lanes.length > MOST_COLORS) {
      add(cell, "rect", { class: "share", ...inner, opacity: share, fill: data.hues[0] });
    } else drawOwners(cell, owners, data, inner);
  });
}

// A band for each rank whose part is in it.
function drawOwners(parent, owners, data, { x, y, width, height }) {
  const band = height / data.lanes.length;
  for (const owner of owners) {
    const fill = data.hues[owner % data.hues.length];
    add(parent, "rect", { x, y: y + band * owner, width, height: band - 1, fill });
  }
}

// A row for each rank, a column for each piece: the stronger, the more of it is there.
function drawGrid(group, held, { stage, lanes, panels }, panel) {
  group.replaceChildren();
  const columns = 1 + Math.max(-1, ...held.flatMap((pieces) => [...pieces.keys()]));
  if (!columns) return;
  const heights = stage.spots.map((spot) => spot[1]);
  const top = Math.min(...heights);
  const [x, y] = [stage.width / 2, (top + Math.max(...heights)) / 2];
  const halfWide = 0.64 * (stage.width / 2 - 1.5 * stage.wide - 12);
  const halfHigh = 0.68 * (y - top - stage.high);
  const width = (2 * halfWide) / columns;
  const height = (2 * halfHigh) / lanes.length;
  held.forEach((pieces, lane) => {
    const share = (at) => pieces.get(at)?.[1] ?? 0;
    let begin = 0; // Neighbours with equal shares are one rectangle.
    for (let end = 1; end <= columns; end += 1) {
      if (end < columns && share(end) === share(begin)) continue;
      const cells = { width: width * (end - begin), height, opacity: 0.08 + 0.92 * share(begin) };
      const at = { x: x - halfWide + width * begin, y: y - halfHigh + height * lane };
      add(group, "rect", { class: "heat", ...at, ...cells });
      begin = end;
    }
  });
  const { title, lasting } = panels[panel];
  const across = lasting ? title : `${columns} pieces; the stronger, the more ranks' parts are in it`;
  const [left, right] = [{ x: x - halfWide, y: y - halfHigh - 6 }, { x: x + halfWide, y: y + halfHigh + 14 }];
  add(group, "text", { class: "axis", ...left }, `down: ${lanes[0]} to ${lanes.at(-1)}`);
  add(group, "text", { class: "axis end", ...right }, `across: ${across}`);
}

function drawStage(parent, { data, id, current, moved }) {
  const { stage, lanes, steps } = data;
  const label = "Ranks and the wires between them; each step is told in words";
  const svg = addStage(parent, stage, id, 34, label);
  const now = steps[current];
  const shown = moved.length || !now ? moved : [current];
  const packets = shown.filter((number) => steps[number].dst >= 0 && steps[number].dst !== steps[number].src);
  const sent = packets.map((number) => steps[number]);
  drawWires(svg, id, stage, now, sent);
  const panel = now?.hung ? -1 : panelOnStage(data, current ?? -1);
  const before = panel < 0 ? [] : heldOn(data, panel, (shown[0] ?? 0) - 1);
  const after = panel < 0 ? ownParts(data, now) : heldOn(data, panel, current ?? -1);
  const boxes = lanes.map((name, lane) => drawBox(svg, name, lane, { stage, now, sent }));
  const grid = add(svg, "g");
  const fill = (held) => {
    if (lanes.length <= MOST_BOXES) boxes.forEach((box, lane) => drawCells(box, held[lane], data, panel));
    else if (panel >= 0) drawGrid(grid, held, data, panel);
  };
  fill(after);
  drawClock(svg, data, now);
  const drawn = packets.map((number) => {
    const changes = data.changes[number].filter((change) => change[0] === panel);
    const owners = changes.flatMap(([, , at]) => before[steps[number].src]?.get(at)?.[2] ?? []);
    const packet = drawPacket(svg, steps[number], data, new Set(owners), sent.length <= MOST_COLORS);
    return [packet, wireOf(stage, steps[number].src, steps[number].dst).ends];
  });
  const isMissing = ({ how }) => how === "missing";
  const isReduced = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (!moved.length || sent.some(isMissing) || isReduced) {
    drawn.forEach(([packet, ends], i) => put(packet, ends, isMissing(sent[i]) ? 0.12 : 0.5, stage));
  } else if (drawn.length) {
    fill(panel < 0 ? after : before);
    move(drawn, stage, () => fill(after));
  }
}

const wireOf = ({ wires }, from, to) => wires.find(({ src, dst }) => src === from && dst === to);

function drawWires(svg, id, stage, now, sent) {
  for (const { src, dst, ends } of stage.wires) {
    const used = sent.find((step) => step.src === src && step.dst === dst);
    const never = now?.hung?.[2].some(([from, to]) => from === src && to === dst);
    let state = used ? `used ${used.how}` : "";
    if (never || used?.how === "missing") state = "missing";
    addWire(svg, id, ends, state);
  }
}

// A rank's box, with its name, and what the rank does; returns what holds its cells.
function drawBox(svg, name, lane, { stage, now, sent }) {
  const { wide, high } = stage;
  const [x, y] = stage.spots[lane];
  const [waits, isAbsent] = (now?.hung ?? [[], []]).map((lanes) => lanes.includes(lane));
  const active = now && !now.hung && [now, ...sent].some(({ src, dst }) => src === lane || dst === lane);
  const state = `${isAbsent ? "absent" : ""} ${waits || active ? "at" : ""}`;
  const machine = add(svg, "g", { class: `machine ${state}`, transform: `translate(${x} ${y})` });
  add(machine, "rect", { class: "box", x: -wide / 2, y: -high / 2, width: wide, height: high, rx: 5 });
  const inside = add(machine, "g");
  const small = wide < SMALL;
  const above = { class: "name", y: small ? 4 : -high / 2 - 6 };
  const text = add(machine, "text", above, small ? String(lane) : shortened(name, wide / 6.2));
  add(text, "title", {}, name);
  if (now?.hung && small) return inside; // The step's sentence says it of all.
  let work = isAbsent ? "never came" : "";
  if (now && !now.hung && now.dst < 0 && now.src === lane) work = shortened(now.mark, wide / 5);
  if (waits) work = "waits";
  if (work) add(machine, "text", { class: "work", y: high / 2 + 15 }, work);
  return inside;
}

// A name is cut in the middle: names mostly differ at an end.
function shortened(name, most) {
  const room = Math.max(3, Math.floor(most));
  if (name.length <= room) return name;
  const head = Math.ceil((room - 1) / 2);
  return `${name.slice(0, head)}…${name.slice(name.length - (room - 1 - head))}`;
}

function drawPacket(svg, step, data, owners, labelled) {
  const side = Math.min(34, 0.45 * data.stage.wide, 10 + 3 * Math.log10(1 + (step.bytes ?? 0)));
  const square = { x: -side / 2, y: -side / 2, width: side, height: side };
  const packet = add(svg, "g", { class: `packet ${step.how}` });
  add(packet, "rect", { ...square, rx: 2, fill: step.color });
  if (data.lanes.length <= MOST_COLORS) drawOwners(packet, owners, data, square);
  add(packet, "text", { y: -side / 2 - 5 }, labelled ? labelOf(step) : "");
  return packet;
}

function put(packet, [from, to], along, { width }) {
  const x = from[0] + (to[0] - from[0]) * along;
  const y = from[1] + (to[1] - from[1]) * along;
  packet.setAttribute("transform", `translate(${x} ${y})`);
  const text = packet.querySelector("text"); // It stays inside the picture.
  const half = 3.2 * text.textContent.length;
  text.setAttribute("x", Math.max(half - x, Math.min(0, width - half - x)));
}

function move(packets, stage, arrived) {
  let begun = null;
  const putAll = (part) => packets.forEach(([packet, ends]) => put(packet, ends, part, stage));
  const frame = (time) => {
    if (!packets[0][0].isConnected) return;
    begun ??= time;
    const part = Math.min(1, (time - begun) / MOVE_MS);
    putAll(part < 0.5 ? 2 * part * part : 1 - 2 * (1 - part) ** 2);
    if (part < 1) requestAnimationFrame(frame);
    else arrived();
  };
  putAll(0);
  requestAnimationFrame(frame);
}

function drawClock(svg, { steps, stage: { width, height } }, now) {
  const end = Math.max(...steps.map(({ at, until }) => Math.max(at, until)));
  if (!(end > 0)) return; // No step has a known duration.
  const cx = 12 + ((width - 24) * (now ? Math.max(now.at, now.until) : 0)) / end;
  add(svg, "line", { class: "clock", x1: 12, x2: width - 12, y1: height + 8, y2: height + 8 });
  add(svg, "circle", { class: "hand", cx, cy: height + 8, r: 5 });
  add(svg, "text", { class: "axis", x: 12, y: height + 26 }, "0 ms");
  const text = `${(end / 1000).toFixed(2)} ms`;
  add(svg, "text", { class: "axis end", x: width - 12, y: height + 26 }, text);
}
