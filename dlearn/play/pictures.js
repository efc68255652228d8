// The pictures of the player, and what each rank holds. Together with player.js this is one script, inside a function.
// Each draws the steps up to the current one into an element of the page, anew.

const ROW_PX = 24;
const MOST_ROWS = 20;
const LANE_PX = 38;
const NAME_PX = 92;
const MOST_ON_AXIS = 40; // steps along one time axis

// Elements. Text is only ever set as text: whatever a rank is called, it cannot become markup.
function add(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return parent.appendChild(made);
}

function addSvg(parent, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ role: "img", ...attributes })) made.setAttribute(key, value);
  return parent.appendChild(made);
}

function addHeads(svg, id) {
  const shape = "viewBox='-8 -4 8 8' refX='-.5' markerWidth='9' markerHeight='9' markerUnits='userSpaceOnUse'";
  const head = (kind) => `<marker id="${id}${kind}" class="${kind}" ${shape} orient="auto"><path d="M-8-4 0 0-8 4z"/></marker>`;
  add(svg, "defs").innerHTML = head("came") + head("missing");
}

function addNames(place, data) {
  const names = add(place, "div", { class: "names" });
  for (const name of data.lanes) add(names, "span", { title: name }, name);
}

const headOf = (id, step) => `url(#${id}${step.how === "missing" ? "missing" : "came"})`;

function sizeText(bytes) {
  if (bytes === null) return "? B";
  for (const [unit, scale] of [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12]]) {
    const number = bytes / scale;
    if (number < 999.5 || unit === "TB") return `${unit === "B" ? number : number.toPrecision(3)} ${unit}`;
  }
}

function labelOf(step) {
  const size = (step.how === "missing" ? "never came: " : "") + sizeText(step.bytes);
  return step.mark ? `${step.mark}: ${size}` : size;
}

// Three pictures: each draws the steps up to the current one into `place`. -------------------------------------------

function drawRows(place, { data, id, played, step, current }) {
  addNames(place, data);
  const first = Math.max(0, step - MOST_ROWS);
  const height = ROW_PX * Math.max(1, Math.min(MOST_ROWS, played.length)) + 8;
  const svg = addSvg(place, { class: "rows", width: "100%", height, "aria-label": "Sequence diagram; its steps are listed in words below" });
  addHeads(svg, id);
  const x = (lane) => (100 * (lane + 0.5)) / data.lanes.length;
  if (step) add(svg, "rect", { class: "mark", width: "100%", height: ROW_PX, y: ROW_PX * (step - first - 1) });
  data.lanes.forEach((_, lane) => add(svg, "line", { class: "lane", x1: `${x(lane)}%`, x2: `${x(lane)}%`, y2: "100%" }));
  played.slice(first, step).forEach((number, row) => {
    const now = data.steps[number];
    const group = add(svg, "svg", { y: ROW_PX * row + 18, class: `step ${now.how} ${number === current ? "current" : ""}` });
    const at = `${x(now.src)}%`;
    if (now.dst < 0) {
      const right = now.src * 2 >= data.lanes.length;
      add(group, "circle", { cx: at, cy: -5, r: 5, fill: now.color });
      const text = add(group, "text", { x: at, dx: right ? -10 : 10, dy: 3 }, now.mark);
      text.style.textAnchor = right ? "end" : "start";
    } else if (now.src === now.dst) {
      const loop = add(group, "svg", { x: at });
      add(loop, "path", { d: "M0-10h18v10H1", "marker-end": headOf(id, now) });
      add(group, "text", { x: at, dx: -22, dy: 3 }, labelOf(now));
    } else {
      add(group, "line", { x1: at, x2: `${x(now.dst)}%`, "marker-end": headOf(id, now) });
      add(group, "text", { x: `${(x(now.src) + x(now.dst)) / 2}%` }, labelOf(now));
    }
  });
}

function drawTimes(place, { data, id, played, step, current }) {
  const page = Math.floor(Math.max(0, step - 1) / MOST_ON_AXIS) * MOST_ON_AXIS;
  const shown = played.slice(page, page + MOST_ON_AXIS);
  const begins = Math.min(...shown.map((number) => data.steps[number].at));
  const ends = Math.max(...shown.map((number) => Math.max(data.steps[number].at, data.steps[number].until)));
  const width = Math.max(320, place.clientWidth);
  const height = LANE_PX * data.lanes.length + 26;
  const x = (at) => NAME_PX + ((width - NAME_PX - 16) * (at - begins)) / Math.max(1, ends - begins);
  const y = (lane) => LANE_PX * (lane + 0.5);
  const svg = addSvg(place, { class: "times", width, height, "aria-label": "Timeline; its steps are listed in words below" });
  addHeads(svg, id);
  data.lanes.forEach((name, lane) => {
    const box = add(svg, "svg", { width: NAME_PX - 6, height, class: "name" });
    add(add(box, "text", { y: y(lane) + 4 }, name), "title", {}, name);
    add(svg, "line", { class: "lane", x1: NAME_PX, x2: width - 8, y1: y(lane), y2: y(lane) });
  });
  shown.forEach((number, place) => {
    const now = data.steps[number];
    const state = number === current ? "current" : page + place < step ? "" : "later";
    const group = add(svg, "g", { class: `step ${now.how} ${state}` });
    const until = Math.max(now.until, now.at);
    if (now.dst < 0) {
      const wide = Math.max(3, x(until) - x(now.at));
      add(group, "rect", { x: x(now.at), y: y(now.src) - 9, width: wide, height: 18, fill: now.color });
      if (wide > 6.5 * now.mark.length || state === "current") add(group, "text", { x: x(now.at) + wide / 2, y: y(now.src) - 11 }, now.mark);
    } else {
      const far = x(until) - x(now.at) < 2 && now.src === now.dst ? 12 : 0;
      add(group, "line", { x1: x(now.at), x2: x(until) + far, y1: y(now.src), y2: y(now.dst), "marker-end": headOf(id, now) });
      const half = 3.5 * labelOf(now).length; // the label stays inside of the picture
      const middle = Math.min(Math.max((x(now.at) + x(until)) / 2, NAME_PX + half), width - half);
      if (state === "current") add(group, "text", { x: middle, y: (y(now.src) + y(now.dst)) / 2 }, labelOf(now));
    }
  });
  svg.append(...svg.querySelectorAll(".current")); // above all others
  add(svg, "text", { class: "axis", x: NAME_PX, y: height - 4 }, `${(begins / 1000).toFixed(2)} ms`);
  add(svg, "text", { class: "axis end", x: width - 8, y: height - 4 }, `${(ends / 1000).toFixed(2)} ms`);
}

function drawGraph(place, { data, played, step }) {
  const lit = played.slice(0, step).map((number) => data.steps[number].lit).filter(Boolean);
  const which = lit.length ? lit.at(-1)[0] : 0;
  const graph = data.graphs[which];
  const [wide, high] = [96, 44];
  const box = add(place, "div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Graph, wider than the page" });
  const svg = addSvg(box, { class: "graph", width: wide * graph.columns + NAME_PX, height: high * graph.rows + 8, "aria-label": "Graph of the backward pass; nodes are filled as they run" });
  const [x, y] = [(column) => NAME_PX + wide * (column + 0.5), (row) => high * (row + 0.5) + 4]; // below its worker's name
  for (const [name, top, rows] of graph.bands) {
    add(svg, "rect", { class: "band", width: "100%", y: high * top + 2, height: high * rows - 4 });
  }
  for (const [from, to, wire] of graph.edges) {
    const [a, b] = [graph.nodes[from], graph.nodes[to]];
    add(svg, "line", { class: wire ? "wire" : "edge", x1: x(a[0]), y1: y(a[1]), x2: x(b[0]), y2: y(b[1]) });
  }
  const ran = lit.filter((each) => each[0] === which).map((each) => each[1]);
  let last = null;
  graph.nodes.forEach(([column, row, name], number) => {
    const state = number === ran.at(-1) ? "current" : ran.includes(number) ? "ran" : "waits";
    const node = add(svg, "g", { class: `node ${state}` });
    add(node, "rect", { x: x(column) - 43, y: y(row) - 12, width: 86, height: 24, rx: 5 });
    const text = add(node, "text", { x: x(column), y: y(row) + 4 }, name.length > 13 ? `${name.slice(0, 12)}…` : name);
    add(text, "title", {}, name);
    if (state === "current") last = x(column);
  });
  const workers = graph.bands.map(([name, top]) => add(svg, "text", { y: high * top + 11, class: "worker" }, name));
  const stay = () => workers.forEach((each) => each.setAttribute("x", box.scrollLeft + 6));
  box.addEventListener("scroll", stay);
  if (last !== null) box.scrollLeft = last - box.clientWidth / 2;
  stay();
}

const VIEWS = { sequence: drawRows, timeline: drawTimes, graph: drawGraph };

// What each rank holds ------------------------------------------------------------------------------------------------

// `named`: the picture above has no column for each rank, so the columns say whose they are.
function drawHeld(place, data, current, named) {
  place.replaceChildren();
  const until = current ?? -1;
  // Of the boards of single operations the one that changed last, or else will change first.
  const ofOne = (changes) => changes.find(([board]) => !data.boards[board].lasting);
  const last = data.changes.slice(0, until + 1).findLast(ofOne) ?? data.changes.slice(until + 1).find(ofOne);
  const recent = last && ofOne(last)[0];
  data.boards.forEach((board, place_of) => {
    if (!board.lasting && place_of !== recent) return;
    const held = new Map();
    const put = ([of, lane, at, text], fresh) => of === place_of && held.set(`${lane} ${at}`, [lane, at, ...data.texts[text], fresh]);
    for (const change of board.start) put(change, false);
    for (let number = 0; number <= until; number += 1) for (const change of data.changes[number]) put(change, number === until);
    add(place, "p", { class: "note" }, board.title);
    if (named && !place.querySelector(".names")) addNames(place, data);
    const columns = add(place, "div", { class: "columns" });
    data.lanes.forEach((name, lane) => {
      const column = add(columns, "ul", { "aria-label": `${name} holds` });
      const own = [...held.values()].filter((each) => each[0] === lane).sort((a, b) => a[1] - b[1]);
      for (const [, at, text, share, fresh] of own) {
        if (!text) continue;
        const chip = add(column, "li", { class: fresh ? "fresh" : "" });
        chip.style.setProperty("--share", `${100 * share}%`);
        if (!board.lasting) add(chip, "b", {}, `${at + 1} `);
        chip.append(text);
      }
    });
  });
}
