// The player. The page holds a still picture and, packed, all that happens: steps, words, what each rank holds. This
// puts controls around it, and shows one step after the other, on a stage or in a graph.

const PLAY_MS = 1200;
const OWN_MS = 150; // for what a rank does by itself, if it changes a box
const MOST_SITES = 6; // lines of code that stand side by side

function mount(root, data) {
  const find = (selector) => root.querySelector(selector);
  const id = root.dataset.player;
  const everything = [...data.steps.keys()];
  const many = data.lanes.length > MOST_BOXES;
  const isMessage = (number) => data.steps[number]?.dst >= 0;

  find(".bar").innerHTML = data.controls;
  find(".totals").innerHTML = data.totals;
  find("details").open = false;
  find("ol").replaceChildren();
  for (const sentence of data.sentences) add(find("ol"), "li", {}, sentence);
  const picture = find(".picture");
  const slider = find("input[type=range]");
  const parts = find(".phase");
  const sites = [...new Set(data.steps.map(({ site }) => site).filter(Boolean))];
  const button = (name) => find(`[data-go=${name}]`);
  const speed = () => Number(find(".speed").value);

  const still = find(".still"); // a film or a sequence, for pages that run no scripts, too
  const views = { stage: drawStage };
  if (still) views[still.dataset.view] = (parent) => parent.append(still);
  if (data.graphs.length) views.graph = drawGraph;

  let played = everything; // the steps that are not hidden
  let step = data.steps.findIndex(({ hung }) => hung) + 1; // how many have been shown: of a hang, up to it
  let view = "stage";
  let moved = []; // the steps that were made to get here: one, or a round of messages that travel together
  let timer = null;
  let width = 0; // for which it is drawn

  function show() {
    const current = played[step - 1];
    const isDay = getComputedStyle(root).getPropertyValue("--paper").trim() === "#fff";
    data.shade = (color) => (isDay ? color : (data.nights[color] ?? color));
    width = picture.clientWidth;
    picture.replaceChildren();
    const panel = views[view](picture, { data, id, played, step, current, moved, speed: speed() });
    drawLegend(find(".legend"), data, panel);
    showWords(current);
    showTotals();
    for (const name of ["start", "back"]) button(name).disabled = step === 0;
    for (const name of ["forward", "end"]) button(name).disabled = step === played.length;
  }

  function showWords(current) {
    const { hung, color = "", site } = data.steps[current] ?? {};
    find(".position").textContent = positionOf(current);
    const shown = sites.length > MOST_SITES ? sites.filter((each) => each === site) : sites;
    find(".sites").replaceChildren();
    for (const each of shown) add(find(".sites"), "code", { class: each === site ? "lit" : "" }, each);
    slider.max = played.length;
    slider.value = step;
    slider.setAttribute("aria-valuetext", `step ${step} of ${played.length}`);
    let sentence = played.length ? "Press Play, Forward, or the right arrow key." : "No message.";
    if (step) sentence = data.sentences[current];
    if (moved.length > 1) sentence = `${moved.length} messages at the same time. One of them: ${sentence}`;
    find(".sentence").textContent = sentence;
    find(".sentence").style.borderColor = hung ? "var(--missing)" : data.shade(color);
    parts.value = data.steps[current ?? played[0]]?.part;
  }

  // A reader counts the rounds of a call, or messages.
  function positionOf(current) {
    const { round, call } = data.steps[current] ?? {};
    const { name, rounds } = data.calls[call] ?? {};
    if (name) return `${name}: round ${rounds.indexOf(round) + 1} of ${rounds.length}`;
    return `message ${played.slice(0, step).filter(isMessage).length} of ${played.filter(isMessage).length}`;
  }

  function showTotals() {
    const rows = data.pairs.map((pair) => [pair, 0, 0]);
    const all = ["in all", 0, 0];
    for (const { dst, how, pair, bytes } of played.slice(0, step).map((number) => data.steps[number])) {
      if (dst < 0 || how === "missing") continue; // What never came was not sent.
      for (const row of [rows[pair], all]) [row[1], row[2]] = [row[1] + 1, row[2] + bytes];
      if (bytes === null) all[0] = "in all, with some of unknown size";
    }
    for (const name of ["tbody", "tfoot"]) find(name).replaceChildren();
    for (const row of rows) addTotal(find("tbody"), row);
    addTotal(find("tfoot"), all);
  }

  // Messages that travel at the same time are shown together when it plays; of many ranks always.
  function edgeOfRound(by) {
    const roundOf = (at) => (isMessage(played[at]) ? data.steps[played[at]].round : NaN);
    let at = step + by;
    while (roundOf(at - 1) === roundOf(at)) at += by;
    return at;
  }

  function go(to, isTogether = to === step + 1) {
    const before = step;
    step = Math.max(0, Math.min(played.length, to));
    moved = isTogether && step > before ? played.slice(before, step) : [];
    show();
    if (step === before) return;
    const at_us = step && data.begin_us + data.steps[played[step - 1]].at;
    root.dispatchEvent(new CustomEvent("dlearn-step", { bubbles: true, detail: { step, at_us } }));
  }

  // What a rank does by itself is skipped, unless it changes a box.
  function play(until = played.length) {
    if (step === played.length) go(0);
    const ms = (number) => (isMessage(number) ? PLAY_MS / speed() : data.changes[number]?.length && OWN_MS);
    const later = () => setTimeout(tick, ms(played[step]));
    const tick = () => {
      go(edgeOfRound(1), true);
      if (!timer || !root.isConnected || step >= until) return pause(); // It may have been paused.
      timer = later();
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
    back: () => go(many ? edgeOfRound(-1) : step - 1),
    forward: () => go(many ? edgeOfRound(1) : step + 1, true),
    end: () => go(played.length),
    play: (wasPlaying) => wasPlaying || play(),
  };
  find(".buttons").addEventListener("click", ({ target }) => {
    const [move, wasPlaying] = [moves[target.dataset.go], timer];
    if (!move) return;
    pause();
    move(wasPlaying);
    // A button that has just been disabled loses the keyboard.
    if (target.disabled) picture.focus({ preventScroll: true });
  });
  slider.addEventListener("input", () => root.dlearnPlayer.go(Number(slider.value)));

  const keys = { ArrowLeft: "back", ArrowRight: "forward", Home: "start", End: "end" };
  const alsoInPicture = { ArrowUp: "back", ArrowDown: "forward" };
  root.addEventListener("keydown", (event) => {
    if (event.target === picture) pause();
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

  for (const name of Object.keys(views)) {
    const attributes = { type: "button", "data-view": name, "aria-pressed": name === view };
    add(find(".views"), "button", attributes, name).addEventListener("click", ({ target }) => {
      view = name;
      for (const other of find(".views").children) other.setAttribute("aria-pressed", other === target);
      show();
    });
  }

  function offer(isHidden, text) {
    if (!everything.some(isHidden)) return { checked: false };
    const label = add(find(".choices"), "label");
    const box = add(label, "input", { type: "checkbox" });
    label.append(` ${text}`);
    box.addEventListener("change", () => {
      const current = played[step - 1] ?? -1;
      played = everything.filter((number) => !(quiet.checked && isControl(number)) && !(alone.checked && isOwn(number)));
      go(played.filter((number) => number <= current).length);
    });
    return box;
  }
  const messages = everything.filter(isMessage);
  const isControl = (number) => data.steps[number].control;
  const isOwn = (number) => messages.length && !isMessage(number) && !data.steps[number].hung;
  const withData = messages.filter((number) => !isControl(number)).length;
  const quiet = offer(isControl, `Hide control messages: ${withData} of ${messages.length} carry data`);
  const alone = offer(isOwn, `Messages only: hide ${everything.filter(isOwn).length} steps inside of ranks`);

  // A call that was chosen in a strip on this page: the player goes to its first step, if it plays that.
  document.addEventListener("dlearn-call", ({ detail }) => {
    const at = (number) => data.begin_us + data.steps[number].at;
    const first = played.findIndex((number) => at(number) >= Math.floor(detail.at_us));
    pause();
    if (first > 0 || (first === 0 && at(played[0]) <= detail.until_us)) go(first + 1);
  });

  const resized = () => picture.clientWidth && picture.clientWidth !== width && show(); // 0: it is hidden
  new ResizeObserver(resized).observe(picture);
  const reads = { tabindex: 0, role: "group", "aria-label": "The arrow keys step through this picture." };
  for (const [name, value] of Object.entries(reads)) picture.setAttribute(name, value);
  show();

  // One collective moves once it is seen, until a click, a key or Python ends it.
  const callOf = (number) => data.calls[data.steps[number].call] ?? {};
  const buckets = messages.filter((number) => callOf(number).bucket >= 0);
  const [first] = [...buckets, ...messages.filter((number) => callOf(number).name && data.steps[number].bytes)];
  const seen = new IntersectionObserver((entries) => {
    if (!entries.at(-1).isIntersecting) return;
    seen.disconnect();
    if (step || timer) return;
    go(first);
    play(played.findLastIndex((number) => callOf(number) === callOf(first)) + 1);
  }, { threshold: 0.5 });
  if (first !== undefined && !isCalm()) seen.observe(picture);
  picture.addEventListener("pointerdown", pause);
  // A move from outside, as by Python, ends the playing.
  root.dlearnPlayer = { go: (to) => (seen.disconnect(), pause(), go(to)) };
  register(id, root, (to) => (to === step || root.dlearnPlayer.go(to), step));
}

function addTotal(body, [name, count, bytes]) {
  const row = add(body, "tr");
  add(row, "th", { scope: "row" }, name);
  add(row, "td", {}, count.toLocaleString("en-US"));
  add(row, "td", {}, `${bytes.toLocaleString("en-US")} B`);
}

mountAll("player", mount);
