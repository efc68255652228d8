// The pictures of the player, and what each rank holds: each draws the steps up to the current one, anew.

const ROW_PX = 24;
const MOST_ROWS = 20;
const AHEAD_ROWS = 6; // of them still to come
const MOST_TEXTS = 8; // lanes with room for words
const MOST_NUMBERS = 24; // lanes with room for a number each
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

function addNames(parent, { lanes }) {
  const names = add(parent, "div", { class: lanes.length > MOST_TEXTS ? "names many" : "names" });
  const every = lanes.length > MOST_NUMBERS ? 8 : 1;
  lanes.forEach((name, lane) => add(names, "span", { title: name }, lane % every ? "" : name));
}

// With its name, where there is room for so many letters; nothing where there is hardly room for one.
function labelOf(step, letters = Infinity) {
  const size = (step.how === "missing" ? "never came: " : "") + sizeText(step.bytes);
  const named = `${step.mark} · ${size}`;
  if (named.length <= letters) return named;
  return letters > 0.5 ? size : "";
}

function drawRows(parent, { data, id, played, step }) {
  addNames(parent, data);
  const lanes = data.lanes.length;
  const first = Math.max(0, Math.min(step + AHEAD_ROWS, played.length) - MOST_ROWS);
  const height = ROW_PX * Math.max(1, Math.min(MOST_ROWS, played.length)) + 8;
  const label = "Sequence diagram; its steps are listed in words below";
  const svg = addSvg(parent, id, { class: "rows", width: "100%", height, "aria-label": label });
  const x = (lane) => `${(100 * (lane + 0.5)) / lanes}%`;
  const y = ROW_PX * (step - first - 1);
  if (step) add(svg, "rect", { class: "mark", width: "100%", height: ROW_PX, y });
  for (let lane = 0; lane < lanes; lane += 1) {
    add(svg, "line", { class: "lane", x1: x(lane), x2: x(lane), y2: "100%" });
  }
  played.slice(first, first + MOST_ROWS).forEach((number, row) => {
    let state = first + row < step ? "" : "later";
    if (first + row === step - 1) state = "current";
    const { how, color } = data.steps[number];
    const group = add(svg, "svg", { class: `step ${how} ${state}`, y: ROW_PX * row + 18 });
    group.style.setProperty("--op", color);
    drawRow(group, data.steps[number], x, lanes, id, parent.clientWidth / lanes);
  });
}

function drawRow(group, { src, dst, hung, ...step }, x, lanes, id, lanePx) {
  const head = { "marker-end": `url(#${id}head)` };
  const label = (across) => labelOf(step, (lanePx * across) / 6.5 - 2);
  if (hung) {
    const [waiting, absent] = hung;
    const words = lanes > MOST_TEXTS ? "✖" : "✖ never came";
    for (const lane of waiting) add(group, "circle", { cx: x(lane), cy: -5, r: 5 });
    for (const lane of absent) add(group, "text", { class: "absent", x: x(lane), dy: 1 }, words);
  } else if (dst < 0) {
    const right = src * 2 >= lanes;
    add(group, "circle", { cx: x(src), cy: -5, r: 5 });
    const text = add(group, "text", { x: x(src), dx: right ? -10 : 10, dy: 3 }, step.mark);
    text.style.textAnchor = right ? "end" : "start";
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
  const svg = addSvg(box, id, {
    class: "graph",
    width: width * scale,
    height: height * scale,
    viewBox: `0 0 ${width} ${height}`,
    "aria-label": "Graph of the backward pass; nodes are filled as they run",
  });
  for (const [name, top, rows] of graph.bands) {
    const y = NODE.down * top + 2;
    add(svg, "rect", { class: "band", width: "100%", y, height: NODE.down * rows - 4 });
  }
  const middles = graph.nodes.map(([column, row]) => {
    return [NAME_PX + NODE.across * (column + 0.5), NODE.down * (row + 0.5) + 4]; // below its worker's name
  });
  for (const [from, to, overWire] of graph.edges) drawEdge(svg, id, middles[from], middles[to], overWire);
  graph.nodes.forEach(([, , name], number) => {
    let state = ran.includes(number) ? "ran" : "waits";
    if (number === ran.at(-1)) state = "current";
    drawNode(svg, name, middles[number], state);
  });
  if (ran.length) box.scrollLeft = middles[ran.at(-1)][0] * scale - box.clientWidth / 2;
  for (const [name, top] of graph.bands) {
    const x = box.scrollLeft / scale + 6; // Where it is in sight.
    add(svg, "text", { x, y: NODE.down * top + 11, class: "worker" }, name);
  }
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

const VIEWS = { stage: drawStage, sequence: drawRows, graph: drawGraph };

// After step `until` (-1: before the first): for each lane of a panel, its cells with text, share, owners, and
// whether that step put them there.
function heldOn(data, number, until) {
  const held = data.lanes.map(() => new Map());
  const put = ([panel, lane, at, ...cell], fresh) => {
    if (panel === number) held[lane].set(at, [...cell, fresh]);
  };
  for (const change of data.panels[number].start) put(change, false);
  for (let step = 0; step <= until; step += 1) {
    for (const change of data.changes[step]) put(change, step === until);
  }
  return held;
}

// The panel of the operation that changed last, or else will change first; -1 if none does.
function recentPanel(data, until) {
  const ofOne = (changes) => changes.find(([panel]) => !data.panels[panel].lasting);
  const before = data.changes.slice(0, until + 1).findLast(ofOne);
  const changes = before ?? data.changes.slice(until + 1).find(ofOne);
  return changes ? ofOne(changes)[0] : -1;
}

// Where the stage is shown, it has what there is of the operation under way. The columns say whose they are unless
// the picture above does, which has a column for each rank.
function drawHeld(parent, data, until, view) {
  parent.replaceChildren();
  if (data.lanes.length > MOST_TEXTS) return; // The stage has room for all.
  const recent = view === "stage" ? -1 : recentPanel(data, until);
  data.panels.forEach((panel, number) => {
    if (!panel.lasting && number !== recent) return;
    add(parent, "p", { class: "note" }, panel.title);
    if (view !== "sequence" && !parent.querySelector(".names")) addNames(parent, data);
    const columns = add(parent, "div", { class: "columns" });
    heldOn(data, number, until).forEach((held, lane) => {
      const column = add(columns, "ul", { "aria-label": `${data.lanes[lane]} holds` });
      for (const [at, [text, share, , fresh]] of [...held].sort(([a], [b]) => a - b)) {
        if (!text) continue;
        const chip = add(column, "li", { class: fresh ? "fresh" : "", title: `${at + 1}: ${text}` });
        chip.style.setProperty("--share", `${100 * share}%`);
        if (!panel.lasting) add(chip, "b", {}, `${at + 1} `);
        chip.append(text);
      }
    });
  });
}
