// The stage: ranks as machines, placed as they talk to each other, and packets that move along their wires. What a
// rank holds of the operation under way stands in its box: a column for each piece, a colour for each rank whose part
// is in it; of many ranks all that they hold is one grid in the middle.

const MOVE_MS = 650;
const MOST_COLORS = 8; // ranks that are told apart by their colours; of more it is told how much is there
const MOST_APART = 320; // from one rank of a row to the next
const MOST_BOXES = 16; // ranks with a box that holds something
const SMALL = 40; // of a box that has room for its number only
const LEAST_WIDE = 14;
const LEAST_PAGE = 9; // for each rank

// Python has placed them on a stage of some width (draw/layout/stage_spots.py): here it is as wide as the page, and boxes
// are as wide as leaves their wires to see. In the middle of a circle is room for a grid.
function stageOf({ stage }, page) {
  const [first, second] = stage.spots.map(([x]) => x).sort((one, other) => one - other);
  const step = Math.min(MOST_APART, page / stage.spots.length);
  const edge = (wide) => wide / 2 + 12;
  const scale = (wide) => (stage.row ? step / (second - first || step) : (page - 2 * edge(wide)) / (stage.width - 2 * edge(stage.wide)));
  const placed = (wide) => stage.spots.map(([x, y]) => [page / 2 + (x - stage.width / 2) * scale(wide), y]);
  let wide = stage.row ? Math.max(24, Math.min(stage.wide, step - Math.min(90, 0.4 * step))) : stage.wide;
  while (wide > LEAST_WIDE && !areApart(placed(wide), wide, stage.high)) wide -= 2;
  const spots = placed(wide);
  const [top, bottom] = [Math.min(...spots.map(([, y]) => y)), Math.max(...spots.map(([, y]) => y))];
  const inside = [[page / 2, (top + bottom) / 2], 0.64 * (page / 2 - edge(wide) - wide), 0.68 * ((bottom - top) / 2 - stage.high)];
  return { ...stage, spots, wide, inside };
}

// Beside each other with a wire between them, or one below the other with its name.
function areApart(spots, wide, high) {
  const [beside, below] = wide < SMALL ? [3, 1] : [36, 24];
  const meet = ([x, y], [to, down]) => Math.abs(x - to) < wide + beside && Math.abs(y - down) < high + below;
  return !spots.some((one, i) => spots.slice(i + 1).some((other) => meet(one, other)));
}

// From the rim of one box to that of another; beside the middle, where packets go both ways.
function wireBetween(from, to, { wide, high }, both) {
  const [dx, dy] = [to[0] - from[0], to[1] - from[1]];
  const far = Math.hypot(dx, dy) || 1;
  const rim = Math.min(wide / 2 / Math.max(1e-6, Math.abs(dx / far)), high / 2 / Math.max(1e-6, Math.abs(dy / far))) + 5;
  const [ax, ay] = both ? [(-dy / far) * 7, (dx / far) * 7] : [0, 0];
  const at = (along) => [from[0] + (dx / far) * along + ax, from[1] + (dy / far) * along + ay];
  return [at(Math.min(rim, far / 2)), at(Math.max(far - rim, far / 2))];
}

// The panel that is shown: of the operation under way, or the next one's, once no rank works towards it any more.
function boardOf(data, until) {
  const recent = boardAt(data, until);
  const begins = data.changes.findIndex((changes) => changes.some(([panel]) => panel === recent));
  const works = data.steps.slice(until + 1, Math.max(begins, 0)).some(({ dst }) => dst < 0);
  return recent < 0 || works ? data.panels.findIndex(({ lasting }) => lasting) : recent;
}

// Who waits in an operation that never ran holds what it came with, and nothing else.
function ownParts(data, now) {
  const [waiting] = now?.hung ?? [[]];
  return waiting.length ? data.lanes.map((_, lane) => new Map(waiting.includes(lane) ? [[0, ["its own part", 1 / data.lanes.length, [lane]]]] : [])) : [];
}

function drawCells(box, held, many, { data, lasting, wide, high }) {
  const places = [...held.keys()].filter((at) => !lasting || held.get(at)[0]).sort((a, b) => a - b);
  if (!places.length) return;
  const [across, down] = lasting ? [1, places.length] : [places.length, 1]; // what lasts has words, one below the other
  const [width, height] = [(wide - 12) / across, (high - 12) / down];
  const gap = Math.min(width, height) > 4 ? 1.5 : 0;
  places.forEach((at, place) => {
    const [text, share, owners] = held.get(at);
    const cell = add(box, "g", { class: "cell" });
    const [x, y] = [-wide / 2 + 6 + width * (place % across), -high / 2 + 6 + height * (place % down)];
    const whole = { x, y, width: width - gap, height: height - (lasting ? gap : 0) };
    add(add(cell, "rect", { class: "slot", ...whole }), "title", {}, text || "nothing");
    if (many || lasting) {
      add(cell, "rect", { class: "share", ...whole, opacity: share, ...(lasting ? {} : { fill: data.hues[0] }) });
    } else {
      const row = height / data.lanes.length;
      for (const owner of owners) {
        add(cell, "rect", { x, y: y + row * owner, width: width - gap, height: row - 1, fill: data.hues[owner % data.hues.length] });
      }
    }
    if (lasting && width > 5.6 * text.length && height > 12) add(cell, "text", { x: x + width / 2, y: y + height / 2 + 4 }, text);
  });
}

// A row for each rank, a column for each place of the panel: the stronger, the more of it is there.
function drawGrid(group, held, { title, lasting }, lanes, { inside: [[x, y], wide, high] }) {
  const columns = 1 + Math.max(...held.flatMap((each) => [...each.keys()]));
  const [width, height] = [(2 * wide) / columns, (2 * high) / held.length];
  held.forEach((each, lane) => {
    const shares = Array.from({ length: columns }, (_, at) => each.get(at)?.[1] ?? 0);
    const begins = shares.flatMap((share, at) => (share === shares[at - 1] ? [] : [at]));
    begins.forEach((at, i) => {
      const run = { x: x - wide + width * at, width: width * ((begins[i + 1] ?? columns) - at), y: y - high + height * lane, height };
      add(group, "rect", { class: "heat", ...run, opacity: 0.08 + 0.92 * shares[at] });
    });
  });
  add(group, "text", { class: "axis", x: x - wide, y: y - high - 6 }, `down: ${lanes[0]} to ${lanes.at(-1)}`);
  add(group, "text", { class: "axis end", x: x + wide, y: y + high + 14 }, lasting ? `across: ${title}` : `across: ${columns} pieces; the stronger, the more ranks' parts are in it`);
}

// An empty stage, as wide as the page, with room `below` it, and the wire from one of its boxes to another.
function addStage(place, data, id, below, label) {
  const width = Math.max(320, LEAST_PAGE * data.lanes.length, place.clientWidth);
  const stage = stageOf(data, width);
  const [tall, fits] = [stage.height + below, Math.min(1, (place.clientWidth || width) / width)];
  const svg = addSvg(place, id, { class: "stage", width: "100%", height: tall * fits, viewBox: `0 0 ${width} ${tall}`, "aria-label": label });
  const both = (src, dst) => stage.pairs.some(([from, to]) => from === dst && to === src);
  const path = (src, dst) => wireBetween(stage.spots[src], stage.spots[dst], stage, both(src, dst));
  const wire = ([from, to], state) => add(svg, "line", { class: `wire ${state}`, x1: from[0], y1: from[1], x2: to[0], y2: to[1], "marker-end": `url(#${id}head)` });
  return { svg, stage, width, path, wire };
}

function drawStage(place, { data, id, current, moved }) {
  const { svg, stage, width, path, wire } = addStage(place, data, id, 34, "Ranks and the wires between them; each step is told in words");
  const { spots, height } = stage;
  const now = data.steps[current];
  const until = current ?? -1;
  const all = (moved.length ? moved : [current]).filter((each) => each !== undefined);
  const sent = all.map((each) => data.steps[each]).filter(({ src, dst }) => dst >= 0 && dst !== src);
  for (const [src, dst] of stage.pairs) {
    const used = sent.find((each) => each.src === src && each.dst === dst);
    const red = now?.hung?.[2].some(([from, to]) => from === src && to === dst) || used?.how === "missing";
    wire(path(src, dst), red ? "missing" : used ? `used ${used.how}` : "");
  }
  const number = now?.hung ? -1 : boardOf(data, until);
  const many = data.lanes.length > MOST_COLORS;
  const [before, after] = number < 0 ? [[], ownParts(data, now)] : [heldOn(data, number, (all[0] ?? 0) - 1), heldOn(data, number, until)];
  const boxes = data.lanes.map((name, lane) => drawBox(svg, name, lane, spots[lane], { data, stage, now, sent }));
  const grid = add(svg, "g");
  const fill = (held) => {
    grid.replaceChildren();
    if (data.lanes.length > MOST_BOXES && !stage.row) return now?.hung || held.every((each) => !each.size) || drawGrid(grid, held, data.panels[number], data.lanes, stage);
    boxes.forEach((box, lane) => {
      box.replaceChildren();
      if (held[lane]) drawCells(box, held[lane], many, { data, lasting: data.panels[number]?.lasting, ...stage });
    });
  };
  fill(after);
  drawClock(svg, data, now, width, height);
  if (now?.hung && stage.wide < SMALL) {
    const [waiting, absent] = now.hung;
    const told = `${waiting.length} ranks wait for ${absent.slice(0, 3).map((lane) => data.lanes[lane]).join(", ")}${absent.length > 3 ? ", ..." : ""}`;
    add(svg, "text", { class: "work", x: width / 2, y: stage.inside[0][1] }, told);
  }
  const packets = all.filter((each) => sent.includes(data.steps[each])).map((each) => {
    const packet = data.steps[each];
    const carried = data.changes[each].filter(([panel]) => panel === number).map(([, , at]) => before[packet.src]?.get(at)?.[2] ?? []);
    return [drawPacket(svg, packet, new Set(carried.flat()), data, many, sent.length <= MOST_COLORS), path(packet.src, packet.dst)];
  });
  const still = !moved.length || sent.some(({ how }) => how === "missing") || matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (still) packets.forEach(([packet, path], i) => put(packet, path, sent[i].how === "missing" ? 0.12 : 0.5, width));
  else if (packets.length) {
    fill(before);
    move(packets, width, () => fill(after));
  }
}

function drawBox(svg, name, lane, [x, y], { data, stage, now, sent }) {
  const { wide, high } = stage;
  const [waiting, absent] = (now?.hung ?? [[], []]).map((lanes) => lanes.includes(lane));
  const at = waiting || (now && !now.hung && [now, ...sent].some(({ src, dst }) => src === lane || dst === lane));
  const machine = add(svg, "g", { class: `machine ${absent ? "absent" : ""} ${at ? "at" : ""}`, transform: `translate(${x} ${y})` });
  add(machine, "rect", { class: "box", x: -wide / 2, y: -high / 2, width: wide, height: high, rx: 5 });
  const inside = add(machine, "g");
  const small = wide < SMALL;
  const text = add(machine, "text", { class: "name", y: small ? 4 : -high / 2 - 6 }, small ? String(lane) : shortened(name, wide / 6.2));
  add(text, "title", {}, name);
  if (now?.hung && small) return inside; // told once, in the middle
  if (waiting) add(machine, "text", { class: "work", y: high / 2 + 15 }, "waits");
  else if (now && !now.hung && now.dst < 0 && now.src === lane) add(machine, "text", { class: "work", y: high / 2 + 15 }, shortened(now.mark, wide / 5));
  else if (absent) add(machine, "text", { class: "work", y: high / 2 + 15 }, "never came");
  return inside;
}

// Names are cut in the middle: where they differ is mostly at an end.
function shortened(name, most) {
  const room = Math.max(3, Math.floor(most));
  if (name.length <= room) return name;
  const head = Math.ceil((room - 1) / 2);
  return `${name.slice(0, head)}…${name.slice(name.length - (room - 1 - head))}`;
}

function drawPacket(svg, now, owners, data, many, label) {
  const side = Math.min(34, 0.45 * data.stage.wide, 10 + 3 * Math.log10(1 + (now.bytes ?? 0)));
  const packet = add(svg, "g", { class: `packet ${now.how}` });
  add(packet, "rect", { x: -side / 2, y: -side / 2, width: side, height: side, rx: 2, fill: now.color });
  if (!many && owners.size) {
    const row = side / data.lanes.length;
    for (const owner of owners) add(packet, "rect", { x: -side / 2, y: -side / 2 + row * owner, width: side, height: row, fill: data.hues[owner % data.hues.length] });
  }
  add(packet, "text", { y: -side / 2 - 5 }, label ? labelOf(now) : "");
  return packet;
}

function put(packet, [from, to], along, width) {
  const [x, y] = [from[0] + (to[0] - from[0]) * along, from[1] + (to[1] - from[1]) * along];
  packet.setAttribute("transform", `translate(${x} ${y})`);
  const text = packet.querySelector("text"); // it stays inside of the picture
  const half = 3.2 * text.textContent.length;
  text.setAttribute("x", Math.max(half - x, Math.min(0, width - half - x)));
}

function move(packets, width, arrived) {
  let begun = null;
  const putAll = (part) => packets.forEach(([packet, path]) => put(packet, path, part, width));
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

function drawClock(svg, data, now, width, height) {
  const end = Math.max(...data.steps.map(({ at, until }) => Math.max(at, until)));
  if (!(end > 0)) return; // nothing is known to take any time
  const x = 12 + ((width - 24) * (now ? Math.max(now.at, now.until) : 0)) / end;
  add(svg, "line", { class: "clock", x1: 12, x2: width - 12, y1: height + 8, y2: height + 8 });
  add(svg, "circle", { class: "hand", cx: x, cy: height + 8, r: 5 });
  add(svg, "text", { class: "axis", x: 12, y: height + 26 }, "0 ms");
  add(svg, "text", { class: "axis end", x: width - 12, y: height + 26 }, `${(end / 1000).toFixed(2)} ms`);
}
