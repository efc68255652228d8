// The pictures of the player, and what each rank holds: each draws the steps up to the current one, anew.

const ROW_PX = 24;
const MOST_ROWS = 20;
const AHEAD_ROWS = 6; // of them still to come
const MOST_TEXTS = 8; // lanes with room for words
const MOST_NUMBERS = 24; // lanes with room for a number each
const NAME_PX = 92;
const LEAST_SCALE = 0.6; // of a graph, so that its names can be read

// A picture, with the heads of its arrows.
function addSvg(parent, id, attributes) {
  const svg = add(parent, "svg", { role: "img", ...attributes });
  const shape = "viewBox='-8 -4 8 8' refX='-.5' markerWidth='9' markerHeight='9' markerUnits='userSpaceOnUse'";
  add(svg, "defs").innerHTML = `<marker id="${id}head" ${shape} orient="auto"><path d="M-8-4 0 0-8 4z"/></marker>`;
  return svg;
}

function addNames(place, data) {
  const names = add(place, "div", { class: data.lanes.length > MOST_TEXTS ? "names many" : "names" });
  const every = data.lanes.length > MOST_NUMBERS ? 8 : 1;
  data.lanes.forEach((name, lane) => add(names, "span", { title: name }, lane % every ? "" : name));
}

// With its name, where there is room for so many letters; nothing where there is hardly room for one.
function labelOf(step, letters = Infinity) {
  const size = (step.how === "missing" ? "never came: " : "") + sizeText(step.bytes);
  const named = `${step.mark} · ${size}`;
  return named.length <= letters ? named : letters > 0.5 ? size : "";
}

function drawRows(place, { data, id, played, step }) {
  addNames(place, data);
  const first = Math.max(0, Math.min(step - MOST_ROWS + AHEAD_ROWS, played.length - MOST_ROWS));
  const height = ROW_PX * Math.max(1, Math.min(MOST_ROWS, played.length)) + 8;
  const svg = addSvg(place, id, { class: "rows", width: "100%", height, "aria-label": "Sequence diagram; its steps are listed in words below" });
  const x = (lane) => (100 * (lane + 0.5)) / data.lanes.length;
  const letters = (lanes) => (place.clientWidth * lanes) / data.lanes.length / 6.5 - 2;
  if (step) add(svg, "rect", { class: "mark", width: "100%", height: ROW_PX, y: ROW_PX * (step - first - 1) });
  data.lanes.forEach((_, lane) => add(svg, "line", { class: "lane", x1: `${x(lane)}%`, x2: `${x(lane)}%`, y2: "100%" }));
  played.slice(first, first + MOST_ROWS).forEach((number, row) => {
    const now = data.steps[number];
    const state = first + row === step - 1 ? "current" : first + row < step ? "" : "later";
    const group = add(svg, "svg", { class: `step ${now.how} ${state}`, y: ROW_PX * row + 18 });
    group.style.setProperty("--op", now.color);
    const at = `${x(now.src)}%`;
    const [waiting, absent] = now.hung ?? [[], []];
    for (const lane of waiting) add(group, "circle", { cx: `${x(lane)}%`, cy: -5, r: 5 });
    for (const lane of absent) add(group, "text", { class: "absent", x: `${x(lane)}%`, dy: 1 }, data.lanes.length > MOST_TEXTS ? "✖" : "✖ never came");
    if (now.hung) return;
    if (now.dst < 0) {
      const right = now.src * 2 >= data.lanes.length;
      add(group, "circle", { cx: at, cy: -5, r: 5 });
      const text = add(group, "text", { x: at, dx: right ? -10 : 10, dy: 3 }, now.mark);
      text.style.textAnchor = right ? "end" : "start";
    } else if (now.src === now.dst) {
      const loop = add(group, "svg", { x: at });
      add(loop, "path", { d: "M0-10h18v10H1", "marker-end": `url(#${id}head)` });
      add(group, "text", { x: at, dx: -22, dy: 3 }, labelOf(now, letters(1)));
    } else {
      add(group, "line", { x1: at, x2: `${x(now.dst)}%`, "marker-end": `url(#${id}head)` });
      add(group, "text", { x: `${(x(now.src) + x(now.dst)) / 2}%` }, labelOf(now, letters(Math.abs(now.src - now.dst))));
    }
  });
}

function drawGraph(place, { data, id, played, step }) {
  const lit = played.slice(0, step).map((number) => data.steps[number].highlighted).filter(Boolean);
  const which = lit.length ? lit.at(-1)[0] : 0;
  const graph = data.graphs[which];
  const [wide, high] = [96, 44];
  const box = add(place, "div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Graph, wider than the page" });
  const [width, height] = [wide * graph.columns + NAME_PX, high * graph.rows + 8];
  const scale = Math.max(LEAST_SCALE, Math.min(1, box.clientWidth / width)); // It fits, or it scrolls.
  const svg = addSvg(box, id, { class: "graph", width: width * scale, height: height * scale, viewBox: `0 0 ${width} ${height}`, "aria-label": "Graph of the backward pass; nodes are filled as they run" });
  const [x, y] = [(column) => NAME_PX + wide * (column + 0.5), (row) => high * (row + 0.5) + 4]; // below its worker's name
  for (const [name, top, rows] of graph.bands) {
    add(svg, "rect", { class: "band", width: "100%", y: high * top + 2, height: high * rows - 4 });
  }
  for (const [from, to, wire] of graph.edges) {
    const [a, b] = [graph.nodes[from], graph.nodes[to]];
    const way = Math.sign(b[0] - a[0]); // From side to side; in one column from below one to above the other.
    const down = way ? 0 : 12 * Math.sign(b[1] - a[1]);
    add(svg, "line", { class: wire ? "wire" : "edge", "marker-end": `url(#${id}head)`, x1: x(a[0]) + 43 * way, y1: y(a[1]) + down, x2: x(b[0]) - 43 * way, y2: y(b[1]) - down });
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
  const stay = () => workers.forEach((each) => each.setAttribute("x", box.scrollLeft / scale + 6));
  box.addEventListener("scroll", stay);
  if (last !== null) box.scrollLeft = last * scale - box.clientWidth / 2;
  stay();
}

const VIEWS = { stage: drawStage, sequence: drawRows, graph: drawGraph };

// After step `until` (-1: before the first): of one panel, by lane, its places with text, share, owners, and whether
// that step put them there.
function heldOn(data, number, until) {
  const held = data.lanes.map(() => new Map());
  const put = ([panel, lane, at, text], fresh) => {
    if (panel === number) held[lane].set(at, [...data.texts[text], fresh]);
  };
  for (const change of data.panels[number].start) put(change, false);
  for (let step = 0; step <= until; step += 1) {
    for (const change of data.changes[step]) put(change, step === until);
  }
  return held;
}

// The panel of the operation that changed last, or else will change first; -1 if none does.
function boardAt(data, until) {
  const ofOne = (changes) => changes.find(([panel]) => !data.panels[panel].lasting);
  const last = data.changes.slice(0, until + 1).findLast(ofOne) ?? data.changes.slice(until + 1).find(ofOne);
  return last ? ofOne(last)[0] : -1;
}

// `named`: the picture above has no column for each rank, so the columns say whose they are.
// `shown`: the stage shows what there is of the operation under way.
function drawHeld(place, data, current, named, shown) {
  place.replaceChildren();
  const until = current ?? -1;
  const recent = shown ? -1 : boardAt(data, until);
  data.panels.forEach((panel, number) => {
    if (!panel.lasting && number !== recent) return;
    add(place, "p", { class: "note" }, panel.title);
    if (named && !place.querySelector(".names")) addNames(place, data);
    const dense = data.lanes.length > MOST_TEXTS; // cells of colour, not text
    const columns = add(place, "div", { class: dense ? "columns dense" : "columns" });
    heldOn(data, number, until).forEach((held, lane) => {
      const column = add(columns, "ul", { "aria-label": `${data.lanes[lane]} holds` });
      for (const [at, [text, share, , fresh]] of [...held].sort(([one], [other]) => one - other)) {
        if (!text && !dense) continue;
        const chip = add(column, "li", { class: fresh ? "fresh" : "", title: `${at + 1}: ${text}` });
        chip.style.setProperty("--share", `${100 * share}%`);
        if (!panel.lasting) add(chip, "b", {}, `${at + 1} `);
        chip.append(text);
      }
    });
  });
}
