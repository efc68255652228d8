// The pictures of the player: each draws the steps up to the current one, anew.

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

function drawGraph(parent, { data, id, played, step }) {
  const highlighted = played.slice(0, step).map((number) => data.steps[number].highlighted).filter(Boolean);
  const which = highlighted.at(-1)?.[0] ?? 0;
  const ran = highlighted.filter(([graph]) => graph === which).map(([, node]) => node);
  const graph = data.graphs[which];
  const width = NODE.across * graph.columns + NAME_PX;
  const height = NODE.down * graph.rows + 8;
  const scale = Math.max(LEAST_SCALE, Math.min(1, parent.clientWidth / width)); // or it scrolls
  const label = "Graph of the backward pass; nodes are filled as they run";
  const size = { width: width * scale, height: height * scale, viewBox: `0 0 ${width} ${height}` };
  const svg = addSvg(parent, id, { class: "graph", ...size, "aria-label": label });
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
  if (ran.length) parent.scrollLeft = middles[ran.at(-1)][0] * scale - parent.clientWidth / 2;
  const x = parent.scrollLeft / scale + 6; // Where it is in sight.
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
function drawLegend(parent, { lanes, panels, calls, whole, shade }, panel) {
  parent.replaceChildren();
  const { title = "", call, start } = panels[panel] ?? {};
  const { name, bucket, bytes, family, color } = calls[call] ?? {};
  const swatch = (hue, words) => add(parent, "span", { class: "swatch", style: `--color: ${hue}` }, words);
  if (!name) return title && swatch("var(--fill)", title);
  const [many, isExchange] = [lanes.length > MOST_BANDS, family === "all_to_all"];
  const all = `ranks ${lanes[0]} to ${lanes.at(-1)}`;
  const isSum = start.some(([, , , , share]) => share > 0 && share < 1);
  const pieces = new Set(start.map(([, , at]) => at)).size;
  const what = `${bucket < 0 ? name : `bucket ${bucket}`} (${sizeText(bytes)})`;
  const columns = isExchange ? `from ${all}` : `the ${pieces} pieces of ${what}`;
  if (!many || !isExchange) add(parent, "span", {}, pieces > 1 ? `columns: ${columns}` : `a box: ${what}`);
  if (!isExchange && lanes.length > MOST_BOXES) add(parent, "span", {}, `rows: ${all}`);
  if (isSum) swatch(shade(color), many ? "the stronger, the more ranks' parts are in it" : "parts add up, a band for each rank");
  swatch(whole, isSum ? "whole: all parts" : "has come");
}

// After step `until` (-1: before the first): for each lane of a panel, its cells with text, share, and owners.
function heldOn({ lanes, panels, changes }, number, until) {
  const held = lanes.map(() => new Map());
  const all = [panels[number].start, ...changes.slice(0, until + 1)].flat();
  for (const [panel, lane, at, ...cell] of all) if (panel === number) held[lane].set(at, cell);
  return held;
}
