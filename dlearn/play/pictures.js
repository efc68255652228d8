// The pictures of the player: each draws the steps up to the current one, anew.

const LINE_PX = 24;
const MOST_LINES = 20;
const AHEAD_ROWS = 3; // still to come
const NAME_PX = 92;
const NODE = { width: 86, height: 24, across: 96, down: 44 }; // of a graph; across and down to the next
const LEAST_SCALE = 0.6; // of a graph, so that its names can be read

// A picture, with the heads of its arrows.
function addSvg(parent, id, attributes) {
  const svg = add(parent, "svg", { role: "img", ...attributes });
  const size = "markerWidth='9' markerHeight='9' markerUnits='userSpaceOnUse'";
  const shape = `viewBox='-8 -4 8 8' refX='-.5' orient='auto' ${size}`;
  add(svg, "defs").innerHTML = `<marker id="${id}head" ${shape}><path d="M-8-4 0 0-8 4z"/></marker>`;
  return svg;
}

// With its name, where there is room for so many letters; nothing where there is hardly room for one.
function labelOf(step, letters = Infinity) {
  const size = (step.how === "missing" ? "never came: " : "") + sizeText(step.bytes);
  const named = `${step.mark} · ${size}`;
  if (named.length <= letters) return named;
  return letters > 0.5 ? size : "";
}

// A row is what travels together, as many lines high as arrows lie on each other.
function rowsOf({ steps }, played) {
  const rows = [];
  played.forEach((number, place) => {
    const { src, dst, round } = steps[number];
    const isNew = dst < 0 || round !== rows.at(-1)?.round;
    if (isNew) rows.push({ round: dst < 0 ? -1 : round, first: place, arrows: [], lines: 0 });
    const [row, left, right] = [rows.at(-1), Math.min(src, dst), Math.max(src, dst)];
    let line = 0;
    while (row.arrows.some((other) => other.line === line && other.left < right && left < other.right)) line += 1;
    row.arrows.push({ number, place, line, left, right });
    row.lines = Math.max(row.lines, line + 1);
  });
  return rows;
}

function drawRows(parent, { data, id, played, step }) {
  const names = add(parent, "div", { class: data.lanes.length > MOST_BANDS ? "names many" : "names" });
  for (const name of data.lanes) add(names, "span", { title: name }, name);
  const lanes = data.lanes.length;
  const rows = rowsOf(data, played);
  const current = rows.findLastIndex(({ first }) => first < step);
  let [first, end] = [Math.max(0, current), Math.min(rows.length, current + 1 + AHEAD_ROWS)];
  const lines = () => rows.slice(first, end).reduce((sum, row) => sum + row.lines, 0);
  while (first > 0 && lines() < MOST_LINES) first -= 1;
  while (end < rows.length && lines() < MOST_LINES) end += 1;
  const label = "Sequence diagram; its steps are listed in words below";
  const height = LINE_PX * Math.max(1, lines()) + 8;
  const svg = addSvg(parent, id, { class: "rows", width: "100%", height, "aria-label": label });
  const x = (lane) => `${(100 * (lane + 0.5)) / lanes}%`;
  for (const lane of data.lanes.keys()) add(svg, "line", { class: "lane", x1: x(lane), x2: x(lane), y2: "100%" });
  let y = 0;
  rows.slice(first, end).forEach((row, number) => {
    const size = { width: "100%", y, height: LINE_PX * row.lines - 2 };
    add(svg, "rect", { class: first + number === current ? "mark" : "round", ...size });
    for (const { number, place, line } of row.arrows) {
      const { how, color } = data.steps[number];
      const state = ["", "current", "later"][1 + Math.sign(place - step + 1)];
      const group = add(svg, "svg", { class: `step ${how} ${state}`, y: y + LINE_PX * line + 18 });
      group.style.setProperty("--op", color);
      drawRow(group, data.steps[number], x, lanes, id, parent.clientWidth / lanes);
    }
    y += LINE_PX * row.lines;
  });
}

function drawRow(group, { src, dst, hung, ...step }, x, lanes, id, lanePx) {
  const head = { "marker-end": `url(#${id}head)` };
  const label = (across) => labelOf(step, (lanePx * across) / 6.5 - 2);
  if (hung) {
    const [waiting, absent] = hung;
    for (const lane of waiting) add(group, "circle", { cx: x(lane), cy: -5, r: 5 });
    for (const lane of absent) add(group, "text", { class: "absent", x: x(lane), dy: 1 }, lanes > MOST_BANDS ? "✖" : "✖ never came");
  } else if (dst < 0) {
    const [dx, anchor] = src * 2 >= lanes ? [-10, "end"] : [10, "start"];
    add(group, "circle", { cx: x(src), cy: -5, r: 5 });
    add(group, "text", { x: x(src), dx, dy: 3, style: `text-anchor: ${anchor}` }, step.mark);
  } else if (src === dst) {
    add(add(group, "svg", { x: x(src) }), "path", { d: "M0-10h18v10H1", ...head });
    add(group, "text", { x: x(src), dx: -22, dy: 3 }, label(1));
  } else {
    add(group, "line", { x1: x(src), x2: x(dst), ...head });
    add(group, "text", { x: x((src + dst) / 2) }, label(Math.abs(src - dst)));
  }
}

function drawGraph(parent, { data, id, played, step }) {
  const highlighted = played.slice(0, step).map((number) => data.steps[number].highlighted).filter(Boolean);
  const which = highlighted.at(-1)?.[0] ?? 0;
  const ran = highlighted.filter(([graph]) => graph === which).map(([, node]) => node);
  const graph = data.graphs[which];
  const scroll = { class: "scroll", tabindex: 0, role: "group", "aria-label": "Graph, wider than the page" };
  const box = add(parent, "div", scroll);
  const width = NODE.across * graph.columns + NAME_PX;
  const height = NODE.down * graph.rows + 8;
  const scale = Math.max(LEAST_SCALE, Math.min(1, box.clientWidth / width)); // It fits, or it scrolls.
  const label = "Graph of the backward pass; nodes are filled as they run";
  const size = { width: width * scale, height: height * scale, viewBox: `0 0 ${width} ${height}` };
  const svg = addSvg(box, id, { class: "graph", ...size, "aria-label": label });
  const bandOf = ([, top, rows]) => ({ y: NODE.down * top + 2, height: NODE.down * rows - 4 });
  for (const band of graph.bands) add(svg, "rect", { class: "band", width: "100%", ...bandOf(band) });
  const middles = graph.nodes.map(([column, row]) => {
    return [NAME_PX + NODE.across * (column + 0.5), NODE.down * (row + 0.5) + 4]; // below its worker's name
  });
  for (const [from, to, overWire] of graph.edges) drawEdge(svg, id, middles[from], middles[to], overWire);
  graph.nodes.forEach(([, , name], number) => {
    const state = ran.includes(number) ? "ran" : "waits";
    drawNode(svg, name, middles[number], number === ran.at(-1) ? "current" : state);
  });
  if (ran.length) box.scrollLeft = middles[ran.at(-1)][0] * scale - box.clientWidth / 2;
  const x = box.scrollLeft / scale + 6; // Where it is in sight.
  for (const [name, top] of graph.bands) add(svg, "text", { x, y: NODE.down * top + 11, class: "worker" }, name);
}

// From side to side; in one column from below one node to above the other.
function drawEdge(svg, id, [x, y], [toX, toY], overWire) {
  const right = (Math.sign(toX - x) * NODE.width) / 2;
  const down = right ? 0 : (Math.sign(toY - y) * NODE.height) / 2;
  const ends = { x1: x + right, y1: y + down, x2: toX - right, y2: toY - down };
  add(svg, "line", { class: overWire ? "wire" : "edge", "marker-end": `url(#${id}head)`, ...ends });
}

function drawNode(svg, name, [x, y], state) {
  const { width, height } = NODE;
  const node = add(svg, "g", { class: `node ${state}` });
  add(node, "rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 5 });
  const short = name.length > 13 ? `${name.slice(0, 12)}…` : name;
  add(add(node, "text", { x, y: y + 4 }, short), "title", {}, name);
}

// What rows, columns and colours are.
function drawLegend(parent, { lanes, panels, calls, whole }, panel) {
  parent.replaceChildren();
  const { title = "", call, start } = panels[panel] ?? {};
  const { name, bucket, bytes, family, color } = calls[call] ?? {};
  if (!name) return add(parent, "span", {}, title);
  const [many, isExchange] = [lanes.length > MOST_BANDS, family === "all_to_all"];
  const all = `ranks ${lanes[0]} to ${lanes.at(-1)}`;
  const isSum = start.some(([, , , , share]) => share > 0 && share < 1);
  const pieces = new Set(start.map(([, , at]) => at)).size;
  const what = `${bucket < 0 ? name : `bucket ${bucket}`} (${sizeText(bytes)})`;
  const columns = isExchange ? `from ${all}` : `the ${pieces} pieces of ${what}`;
  add(parent, "span", {}, pieces > 1 ? `columns: ${columns}` : `a box: ${what}`);
  if (many && (isExchange || lanes.length > MOST_BOXES)) add(parent, "span", {}, `rows: ${all}`);
  const swatch = (hue, words) => add(parent, "span", { class: "swatch", style: `--color: ${hue}` }, words);
  if (isSum) swatch(color, many ? "the stronger, the more ranks' parts are in it" : "parts add up, a band for each rank");
  swatch(whole, isSum ? "whole: all parts" : "has come");
}

const VIEWS = { stage: drawStage, sequence: drawRows, graph: drawGraph };

// After step `until` (-1: before the first): for each lane of a panel, its cells with text, share, and owners.
function heldOn({ lanes, panels, changes }, number, until) {
  const held = lanes.map(() => new Map());
  const all = [panels[number].start, ...changes.slice(0, until + 1)].flat();
  for (const [panel, lane, at, ...cell] of all) if (panel === number) held[lane].set(at, cell);
  return held;
}
