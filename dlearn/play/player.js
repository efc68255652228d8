// The player. The page holds a still picture and, packed, all that happens: steps, words, what each rank holds. This
// puts controls around it, and shows one step after the other: on a stage, as rows, or in a graph.

const PLAY_MS = 1200;
const OWN_MS = 150; // for what a rank does by itself: nothing moves

const MOVES = ["Start", "Back", "Forward", "End", "Play"];
const MOVE_BUTTONS = MOVES.map((name) => `<button type="button" data-go="${name.toLowerCase()}">${name}</button>`);
const CONTROLS = `
  <div class="buttons">
    ${MOVE_BUTTONS.join(" ")}
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
  <tbody></tbody><tfoot></tfoot></table>`;

function mount(root, data) {
  const find = (selector) => root.querySelector(selector);
  const id = root.dataset.player;
  const everything = [...data.steps.keys()];
  const many = data.lanes.length > MOST_BOXES;
  const isMessage = (number) => data.steps[number].dst >= 0;

  find(".bar").innerHTML = CONTROLS;
  find(".totals").innerHTML = TOTALS;
  find("details").open = false;
  find("ol").replaceChildren();
  for (const sentence of data.sentences) add(find("ol"), "li", {}, sentence);
  const picture = find(".picture");
  const slider = find("input[type=range]");
  const parts = find(".phase");
  const button = (name) => find(`[data-go=${name}]`);

  let played = everything; // the steps that are not hidden
  let step = data.steps.findIndex(({ hung }) => hung) + 1; // how many have been shown: of a hang, up to it
  let view = "stage";
  let moved = []; // the steps that were made to get here: one, or a round of messages that travel together
  let timer = null;
  let width = 0; // for which it is drawn

  function show() {
    const current = played[step - 1];
    width = picture.clientWidth;
    picture.replaceChildren();
    VIEWS[view](picture, { data, id, played, step, current, moved });
    drawHeld(find(".holds"), data, current ?? -1, view);
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
    const keys = "press Play, Forward, or the right arrow key.";
    let sentence = played.length ? `${played.length} steps to come: ${keys}` : "No message.";
    if (step) sentence = data.sentences[current];
    if (moved.length > 1) sentence = `${moved.length} messages at the same time. One of them: ${sentence}`;
    const { hung, color = "" } = data.steps[current] ?? {};
    find(".sentence").textContent = sentence;
    find(".sentence").style.borderColor = hung ? "var(--missing)" : color;
    parts.value = data.steps[current ?? played[0]]?.part;
  }

  function showTotals() {
    const [counts, bytes] = [data.pairs.map(() => 0), data.pairs.map(() => 0)];
    let unsized = 0;
    for (const shown of played.slice(0, step).map((number) => data.steps[number])) {
      if (shown.dst < 0 || shown.how === "missing") continue; // What never came was not sent.
      counts[shown.pair] += 1;
      bytes[shown.pair] += shown.bytes;
      unsized += shown.bytes === null;
    }
    ["tbody", "tfoot"].forEach((name) => find(name).replaceChildren());
    data.pairs.forEach((pair, i) => addTotal(find("tbody"), pair, counts[i], bytes[i]));
    addTotal(find("tfoot"), unsized ? `in all; ${unsized} of unknown size` : "in all", sum(counts), sum(bytes));
  }

  // Messages that travel at the same time are shown together when it plays; of many ranks always.
  function sameRound(number, other) {
    return isMessage(number) && isMessage(other) && data.steps[number].round === data.steps[other].round;
  }
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
    if (step === before) return;
    const at_us = step && data.begin_us + data.steps[played[step - 1]].at;
    root.dispatchEvent(new CustomEvent("dlearn-step", { bubbles: true, detail: { step, at_us } }));
  }

  function play() {
    if (step === played.length) go(0);
    const tick = () => {
      if (!root.isConnected) return pause();
      go(endOfRound(), endOfRound());
      if (timer) timer = later();
    };
    const later = () => setTimeout(tick, isMessage(played[step]) ? PLAY_MS : OWN_MS);
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

  const names = new Set(data.steps.map(({ part }) => part));
  for (const name of names) parts.add(new Option(name || "(no name)", name));
  parts.hidden = names.size < 2;
  parts.addEventListener("change", () => {
    pause();
    const first = played.findIndex((number) => data.steps[number].part === parts.value);
    if (first >= 0) go(first + 1);
    else showWords(played[step - 1]);
  });

  for (const name of Object.keys(VIEWS)) {
    if (name === "graph" && !data.graphs.length) continue;
    const attributes = { type: "button", "data-view": name, "aria-pressed": name === view };
    add(find(".views"), "button", attributes, name).addEventListener("click", () => {
      view = name;
      for (const other of root.querySelectorAll("[data-view]")) {
        other.setAttribute("aria-pressed", other.dataset.view === view);
      }
      show();
    });
  }

  function offer(selector, isHidden, text) {
    const box = find(selector);
    box.parentNode.hidden = !everything.some(isHidden);
    box.nextElementSibling.textContent = text;
    box.addEventListener("change", () => {
      const current = played[step - 1] ?? -1;
      played = everything.filter((number) => !(quiet.checked && isControl(number)) && !(alone.checked && isOwn(number)));
      go(played.filter((number) => number <= current).length);
    });
  }
  const [quiet, alone] = [find(".quiet"), find(".alone")];
  const isControl = (number) => data.steps[number].control;
  const isOwn = (number) => messages.length && !isMessage(number) && !data.steps[number].hung;
  const messages = everything.filter(isMessage);
  const withData = messages.filter((number) => !isControl(number));
  offer(".quiet", isControl, `Hide control messages: ${withData.length} of ${messages.length} carry data`);
  offer(".alone", isOwn, `Messages only: hide ${everything.filter(isOwn).length} steps inside of ranks`);

  // A call that was chosen in a strip on this page: the player goes to its first step, if it plays that.
  document.addEventListener("dlearn-call", ({ detail }) => {
    const at = (number) => data.begin_us + data.steps[number].at;
    const first = played.findIndex((number) => at(number) >= Math.floor(detail.at_us));
    pause();
    const isBefore = first === 0 && at(played[0]) > detail.until_us;
    if (first >= 0 && !isBefore) go(first + 1);
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

function addTotal(body, name, count, bytes) {
  const row = add(body, "tr");
  add(row, "th", { scope: "row" }, name);
  add(row, "td", {}, count.toLocaleString("en-US"));
  add(row, "td", {}, `${bytes.toLocaleString("en-US")} B`);
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

mountAll("player", mount);
