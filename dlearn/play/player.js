// The player. The page holds a still picture and, packed, everything that happens: steps, words, what each rank holds.
// This unpacks it, puts controls around it, and shows one step after the other: as rows, along a time axis, or in a graph.
(() => {
  const ROW_PX = 24;
  const MOST_ROWS = 20;
  const LANE_PX = 38;
  const NAME_PX = 92;
  const MOST_ON_AXIS = 40; // steps along one time axis
  const PLAY_MS = 1200;
  const HOW = ["observed", "derived", "inferred", "missing"];

  const CONTROLS = `
    <div class="buttons">
      <button type="button" data-go="start">Start</button>
      <button type="button" data-go="back">Back</button>
      <button type="button" data-go="forward">Forward</button>
      <button type="button" data-go="end">End</button>
      <button type="button" data-go="play">Play</button>
      <select class="speed" aria-label="Speed">
        <option value="0.5">half speed</option><option value="1" selected>normal</option>
        <option value="2">2 times</option><option value="4">4 times</option>
      </select>
      <select class="phase" aria-label="Jump to a part"></select>
      <span class="views" role="group" aria-label="Picture"></span>
      <span class="position"></span>
    </div>
    <div class="choices">
      <label hidden><input type="checkbox" class="quiet"> <span></span></label>
      <label hidden><input type="checkbox" class="alone"> <span></span></label>
    </div>
    <input type="range" min="0" value="0" aria-label="Step">
    <p class="sentence" aria-live="polite"></p>`;

  const TOTALS = `
    <table aria-label="Sent so far">
      <thead><tr><th scope="col">sent so far</th><th scope="col">messages</th><th scope="col">bytes</th></tr></thead>
      <tbody></tbody>
      <tfoot><tr><th scope="row">in all</th><td></td><td></td></tr></tfoot>
    </table>`;

  async function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

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

  const headOf = (id, step) => `url(#${id}${step.how === "missing" ? "missing" : "came"})`;

  function sizeText(bytes) {
    for (const [unit, scale] of [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9]]) {
      const number = bytes / scale;
      if (number < 999.5 || unit === "GB") return `${unit === "B" ? number : number.toPrecision(3)} ${unit}`;
    }
  }

  function labelOf(step) {
    const size = (step.how === "missing" ? "never came: " : "") + sizeText(step.bytes);
    return step.mark ? `${step.mark}: ${size}` : size;
  }

  // Three pictures: each draws the steps up to the current one into `place`. -------------------------------------------

  function drawNames(place, data) {
    const names = add(place, "div", { class: "names" });
    for (const name of data.lanes) add(names, "span", { title: name }, name);
  }

  function drawRows(place, { data, id, played, step, current }) {
    drawNames(place, data);
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
    add(svg, "text", { class: "axis", x: NAME_PX, y: height - 4 }, `${((begins - data.begins) / 1000).toFixed(2)} ms`);
    add(svg, "text", { class: "axis end", x: width - 8, y: height - 4 }, `${((ends - data.begins) / 1000).toFixed(2)} ms`);
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
    const ahead = data.changes.findIndex((changes, number) => number > until && changes.some(([board]) => !data.boards[board].lasting));
    let recent = ahead < 0 ? null : data.changes[ahead].find(([board]) => !data.boards[board].lasting)[0];
    for (let number = until; number >= 0; number -= 1) {
      const own = data.changes[number].find(([board]) => !data.boards[board].lasting);
      if (own) {
        recent = own[0];
        break;
      }
    }
    data.boards.forEach((board, place_of) => {
      if (!board.lasting && place_of !== recent) return;
      const held = new Map();
      const put = ([of, lane, at, text], fresh) => of === place_of && held.set(`${lane} ${at}`, [lane, at, ...data.texts[text], fresh]);
      for (const change of board.start) put(change, false);
      for (let number = 0; number <= until; number += 1) for (const change of data.changes[number]) put(change, number === until);
      add(place, "p", { class: "note" }, board.title);
      if (named && !place.querySelector(".names")) drawNames(place, data);
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

  // One player ----------------------------------------------------------------------------------------------------------

  function mount(root, data) {
    const find = (selector) => root.querySelector(selector);
    const id = root.dataset.player;
    const everything = data.steps.map((_, number) => number);
    const messages = everything.filter((number) => data.steps[number].dst >= 0);
    const carryData = messages.filter((number) => !data.steps[number].control);

    find(".bar").innerHTML = CONTROLS;
    find(".totals").innerHTML = TOTALS;
    find("details").open = false;
    find("ol").replaceChildren(...data.sentences.map((sentence) => Object.assign(document.createElement("li"), { textContent: sentence })));
    const picture = find(".picture");
    const slider = find("input[type=range]");
    const button = (name) => find(`[data-go=${name}]`);
    const totals = data.pairs.map((pair) => addTotal(find("tbody"), pair));

    let played = everything; // steps, by their place among all
    let step = 0; // how many of them have been shown
    let view = "sequence";
    let timer = null;

    function show() {
      const current = played[step - 1];
      picture.replaceChildren();
      VIEWS[view](picture, { data, id, played, step, current });
      drawHeld(find(".holds"), data, current, view !== "sequence");
      showWords(current);
      showTotals();
      for (const name of ["start", "back"]) button(name).disabled = step === 0;
      for (const name of ["forward", "end"]) button(name).disabled = step === played.length;
    }

    function showWords(current) {
      const position = `step ${step} of ${played.length}`;
      find(".position").textContent = position;
      slider.max = played.length;
      slider.value = step;
      slider.setAttribute("aria-valuetext", position);
      const nothing = played.length ? "Nothing has happened yet. Press Forward, or the right arrow key." : "No message.";
      find(".sentence").textContent = step ? data.sentences[current] : nothing;
      find(".sentence").style.borderColor = step ? data.steps[current].color : "";
      find(".phase").value = step ? data.steps[current].part : data.steps[played[0]]?.part ?? -1;
    }

    function showTotals() {
      const counts = data.pairs.map(() => 0);
      const bytes = data.pairs.map(() => 0);
      // What never came was not sent, as far as anybody knows.
      for (const { dst, how, pair, bytes: size } of played.slice(0, step).map((number) => data.steps[number])) {
        if (dst < 0 || how === "missing") continue;
        counts[pair] += 1;
        bytes[pair] += size;
      }
      totals.forEach((row, pair) => fill(row, counts[pair], bytes[pair]));
      fill(find("tfoot tr"), sum(counts), sum(bytes));
    }

    function go(to) {
      const before = step;
      step = Math.max(0, Math.min(played.length, to));
      show();
      if (step === played.length) pause();
      if (step !== before) root.dispatchEvent(new CustomEvent("dlearn-step", { bubbles: true, detail: { step } }));
    }

    function play() {
      if (step === played.length) go(0);
      const tick = () => (root.isConnected ? go(step + 1) : pause());
      timer = setInterval(tick, PLAY_MS / Number(find(".speed").value));
      button("play").textContent = "Pause";
    }

    function pause() {
      clearInterval(timer);
      timer = null;
      button("play").textContent = "Play";
    }

    const moves = {
      start: () => go(0),
      back: () => go(step - 1),
      forward: () => go(step + 1),
      end: () => go(played.length),
    };
    for (const [name, move] of Object.entries(moves)) {
      button(name).addEventListener("click", () => {
        pause();
        move();
        // A button that has just been disabled loses the keyboard.
        if (button(name).disabled) picture.focus({ preventScroll: true });
      });
    }
    button("play").addEventListener("click", () => (timer ? pause() : play()));
    find(".speed").addEventListener("change", () => timer && (pause(), play()));
    slider.addEventListener("input", () => {
      pause();
      go(Number(slider.value));
    });

    const keys = { ArrowLeft: "back", ArrowRight: "forward", Home: "start", End: "end" };
    const alsoInPicture = { ArrowUp: "back", ArrowDown: "forward" };
    root.addEventListener("keydown", (event) => {
      const name = keys[event.key] ?? (event.target === picture && alsoInPicture[event.key]);
      if (!name || event.target.tagName === "SELECT" || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      pause();
      moves[name]();
    });

    const parts = find(".phase");
    data.parts.forEach((name, part) => (parts.add(new Option(name || "(no name)", part))));
    parts.hidden = data.parts.length < 2;
    parts.addEventListener("change", () => {
      pause();
      const first = played.findIndex((number) => data.steps[number].part === Number(parts.value));
      if (first >= 0) go(first + 1);
      else showWords(played[step - 1]);
    });

    for (const name of data.graphs.length ? Object.keys(VIEWS) : ["sequence", "timeline"]) {
      const chooser = add(find(".views"), "button", { type: "button", "data-view": name, "aria-pressed": name === view }, name);
      chooser.addEventListener("click", () => {
        view = name;
        for (const each of root.querySelectorAll("[data-view]")) each.setAttribute("aria-pressed", each.dataset.view === view);
        show();
      });
    }

    function offer(selector, text) {
      const box = find(selector);
      box.parentNode.hidden = !text;
      box.nextElementSibling.textContent = text;
      box.addEventListener("change", () => {
        const current = played[step - 1] ?? -1;
        const wanted = (number) =>
          !(find(".quiet").checked && data.steps[number].control) && !(find(".alone").checked && data.steps[number].dst < 0);
        played = everything.filter(wanted);
        go(played.filter((number) => number <= current).length);
      });
    }
    const [own, control] = [everything.length - messages.length, messages.length - carryData.length];
    offer(".quiet", control && `Hide control messages: ${carryData.length} of ${messages.length} carry data`);
    offer(".alone", own && messages.length && `Messages only: hide ${own} steps inside of ranks`);

    let width = 0;
    const resized = () => {
      if (view === "timeline" && width && width !== picture.clientWidth) show();
      width = picture.clientWidth;
    };
    new ResizeObserver(resized).observe(picture);

    picture.tabIndex = 0;
    picture.setAttribute("role", "group");
    picture.setAttribute("aria-label", "The arrow keys step through this picture.");
    find(".totals").tabIndex = 0;
    show();
    // Whoever else moves it, as Python does, ends the playing.
    root.dlearnPlayer = { go: (to) => (pause(), go(to)), get step() { return step; } };
    const shown = (globalThis.dlearnPlayers ??= new Map());
    shown.set(id, (shown.get(id) ?? new Set()).add(root));
  }

  function addTotal(body, pair) {
    const row = body.insertRow();
    const name = row.appendChild(document.createElement("th"));
    name.scope = "row";
    name.textContent = pair;
    row.insertCell();
    row.insertCell();
    return row;
  }

  function fill(row, count, bytes) {
    row.cells[1].textContent = count.toLocaleString("en-US");
    row.cells[2].textContent = `${bytes.toLocaleString("en-US")} B`;
  }

  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

  // In the page each fact about the steps is a column of its own, which packs well. Here a step is an object.
  function unfold(data) {
    const { src, dst, pair, color, bytes, how, control, at, until, part, mark, lit } = data.steps;
    data.steps = src.map((lane, i) => ({
      src: lane, dst: dst[i], pair: pair[i], color: data.colors[color[i]], bytes: bytes[i], how: HOW[how[i]],
      control: control[i], at: at[i], until: until[i], part: part[i], mark: data.marks[mark[i]], lit: lit[i] || null,
    }));
    return data;
  }

  // A page may hold several players, each with a script of its own: whichever runs takes all that no other has taken.
  for (const root of document.querySelectorAll(".dlearn-player")) {
    if (root.dlearnPlayer) continue;
    root.dlearnPlayer = true;
    const packed = root.querySelector("script[type='application/dlearn']").textContent;
    // Where a browser cannot do it, the still picture and the words stay, and the page says why.
    unpack(packed).then((data) => mount(root, unfold(data))).catch((error) => {
      root.querySelector(".bar").textContent = `This browser cannot play it (${error}).`;
    });
  }
})();
