// The player. The page holds a still picture and, packed, everything that happens: steps, words, what each rank holds.
// This unpacks it, puts controls around it, and shows one step after the other: as rows, along a time axis, or in a graph.
// pictures.js, which draws, stands before it in the same function.

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
