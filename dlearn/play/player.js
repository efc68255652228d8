// The player. The page holds a still picture and, packed, everything that happens: steps, words, what each rank holds.
// This unpacks it, puts controls around it, and shows one step after the other: on a stage, as rows, or in a graph.

const PLAY_MS = 1200;
const OWN_MS = 150; // for what a rank does by itself: nothing moves

const CONTROLS = `
  <div class="buttons">
    ${["Start", "Back", "Forward", "End", "Play"].map((name) => `<button type="button" data-go="${name.toLowerCase()}">${name}</button>`).join(" ")}
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

const TOTALS = `<table aria-label="Sent so far">
  <thead><tr><th scope="col">sent so far</th><th scope="col">messages</th><th scope="col">bytes</th></tr></thead>
  <tbody></tbody><tfoot><tr><th scope="row">in all</th><td></td><td></td></tr></tfoot></table>`;

function mount(root, data) {
  const find = (selector) => root.querySelector(selector);
  const id = root.dataset.player;
  const everything = data.steps.map((_, number) => number);
  const messages = everything.filter((number) => data.steps[number].dst >= 0);
  const many = data.lanes.length > MOST_BOXES;
  const carryData = messages.filter((number) => !data.steps[number].control);

  find(".bar").innerHTML = CONTROLS;
  find(".totals").innerHTML = TOTALS;
  find("details").open = false;
  find("ol").replaceChildren(...data.sentences.map((sentence) => Object.assign(document.createElement("li"), { textContent: sentence })));
  const picture = find(".picture");
  const slider = find("input[type=range]");
  const button = (name) => find(`[data-go=${name}]`);
  const totals = data.pairs.map((pair) => addTotal(find("tbody"), pair));

  const roomy = picture.style.minWidth; // for a column each
  let played = everything; // steps, by their place among all
  let step = data.steps.findIndex((each) => each.hung) + 1; // how many of them have been shown: of a hang, up to that
  let view = "stage";
  let moved = []; // the steps that were made to get here, if one was, or a round of messages that travel together
  let timer = null;
  let width = 0; // for which it is drawn

  function show() {
    const current = played[step - 1];
    width = picture.clientWidth;
    picture.replaceChildren();
    picture.style.minWidth = view === "stage" ? "0" : roomy;
    VIEWS[view](picture, { data, id, played, step, current, moved });
    drawHeld(find(".holds"), data, current, view !== "sequence", view === "stage" || many); // of many the stage has a grid
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
    const nothing = played.length ? `${played.length} steps to come: press Play, Forward, or the right arrow key.` : "No message.";
    const together = moved.length > 1 ? `${moved.length} messages at the same time. One of them: ` : "";
    find(".sentence").textContent = step ? together + data.sentences[current] : nothing;
    find(".sentence").style.borderColor = step ? (data.steps[current].hung ? "var(--missing)" : data.steps[current].color) : "";
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

  // Those that follow, and travel at the same time, are shown together when it plays; of many ranks always.
  const sameRound = (number, other) => [number, other].every((each) => data.steps[each].dst >= 0) && data.steps[number].round === data.steps[other].round;
  function endOfRound() {
    let end = step + 1;
    while (end < played.length && sameRound(played[step], played[end])) end += 1;
    return end;
  }
  function beginOfRound() {
    let begin = step - 1;
    while (begin > 0 && sameRound(played[begin - 1], played[step - 1])) begin -= 1;
    return begin;
  }

  function go(to, together = step + 1) {
    const before = step;
    step = Math.max(0, Math.min(played.length, to));
    moved = step > before && step <= together ? played.slice(before, step) : [];
    show();
    if (step === played.length) pause();
    if (step !== before) root.dispatchEvent(new CustomEvent("dlearn-step", { bubbles: true, detail: { step, at_us: step && data.begin_us + data.steps[played[step - 1]].at } }));
  }

  function play() {
    if (step === played.length) go(0);
    const next = (end) => go(end, end);
    const later = () => setTimeout(tick, data.steps[played[step]].dst < 0 ? OWN_MS : PLAY_MS);
    const tick = () => {
      if (!root.isConnected) return pause();
      next(endOfRound());
      if (timer) timer = later();
    };
    timer = later();
    button("play").textContent = "Pause";
  }

  function pause() {
    clearTimeout(timer);
    timer = null;
    button("play").textContent = "Play";
  }

  const moves = {
    start: () => go(0),
    back: () => go(many ? beginOfRound() : step - 1),
    forward: () => (many ? go(endOfRound(), endOfRound()) : go(step + 1)),
    end: () => go(played.length),
  };
  find(".buttons").addEventListener("click", ({ target }) => {
    const move = moves[target.dataset.go];
    if (!move) return;
    pause();
    move();
    // A button that has just been disabled loses the keyboard.
    if (target.disabled) picture.focus({ preventScroll: true });
  });
  button("play").addEventListener("click", () => (timer ? pause() : play()));
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

  for (const name of data.graphs.length ? Object.keys(VIEWS) : ["stage", "sequence"]) {
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
        !(find(".quiet").checked && data.steps[number].control) && !(find(".alone").checked && data.steps[number].dst < 0 && !data.steps[number].hung);
      played = everything.filter(wanted);
      go(played.filter((number) => number <= current).length);
    });
  }
  const [own, control] = [everything.filter((number) => data.steps[number].dst < 0 && !data.steps[number].hung).length, messages.length - carryData.length];
  offer(".quiet", control && `Hide control messages: ${carryData.length} of ${messages.length} carry data`);
  offer(".alone", own && messages.length && `Messages only: hide ${own} steps inside of ranks`);

  // A call that was chosen in a strip on this page: the player goes to its first step, if it plays that.
  document.addEventListener("dlearn-call", ({ detail }) => {
    const found = played.findIndex((number) => data.begin_us + data.steps[number].at >= Math.floor(detail.at_us));
    detail.players += 1;
    pause();
    if (found < 0 || (found === 0 && data.begin_us + data.steps[played[0]].at > detail.until_us)) return;
    detail.followed += 1;
    go(found + 1);
  });

  const resized = () => picture.clientWidth && picture.clientWidth !== width && show(); // 0: it is hidden
  new ResizeObserver(resized).observe(picture);

  picture.tabIndex = 0;
  picture.setAttribute("role", "group");
  picture.setAttribute("aria-label", "The arrow keys step through this picture.");
  find(".totals").tabIndex = 0;
  show();
  // A move from outside, as by Python, ends the playing.
  root.dlearnPlayer = { go: (to) => (pause(), go(to)) };
  register(id, root, (to) => (to === step || root.dlearnPlayer.go(to), step));
}

function addTotal(body, pair) {
  const row = add(body, "tr");
  for (const name of ["th", "td", "td"]) add(row, name, name === "th" ? { scope: "row" } : {}, name === "th" ? pair : "");
  return row;
}

function fill(row, count, bytes) {
  row.cells[1].textContent = count.toLocaleString("en-US");
  row.cells[2].textContent = `${bytes.toLocaleString("en-US")} B`;
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

// In the page each fact about the steps is a column of its own, which packs well. Here a step is an object.
function unfold(data) {
  const columns = Object.entries(data.steps);
  data.steps = data.sentences.map((_, i) => Object.fromEntries(columns.map(([name, values]) => [name, values[i]])));
  return data;
}

mountAll("player", (root, facts) => mount(root, unfold(facts)));
