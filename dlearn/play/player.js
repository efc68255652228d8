// The message player. The page already holds the whole picture (an SVG, one row per message) and all sentences (a list).
// This shows them step by step: the rows up to the current message, its sentence, and the bytes sent so far.
(() => {
  const ROW_PX = 24;
  const MOST_ROWS = 20;
  const PLAY_MS = 1200;

  const CONTROLS = `
    <div class="buttons">
      <button type="button" data-go="start">Start</button>
      <button type="button" data-go="back">Back</button>
      <button type="button" data-go="forward">Forward</button>
      <button type="button" data-go="end">End</button>
      <button type="button" data-go="play">Play</button>
      <span class="position"></span>
      <label hidden><input type="checkbox"> <span></span></label>
    </div>
    <input type="range" min="0" value="0" aria-label="Message">
    <p class="sentence" aria-live="polite"></p>`;

  const TOTALS = `
    <table aria-label="Sent so far">
      <thead><tr><th scope="col">sent so far</th><th scope="col">messages</th><th scope="col">bytes</th></tr></thead>
      <tbody></tbody>
      <tfoot><tr><th scope="row">in all</th><td></td><td></td></tr></tfoot>
    </table>`;

  function mount(root) {
    const find = (selector) => root.querySelector(selector);
    const data = JSON.parse(find("script[type='application/json']").textContent);
    const sentences = [...root.querySelectorAll("li")].map((item) => item.textContent);
    const rows = [...root.querySelectorAll(".messages svg[y]")];
    const everything = rows.map((_, message) => message);
    const carryData = everything.filter((message) => !data.control[message]);

    find(".bar").innerHTML = CONTROLS;
    find(".totals").innerHTML = TOTALS;
    find("details").open = false;
    const picture = find(".picture");
    const slider = find("input[type=range]");
    const box = find("input[type=checkbox]");
    const button = (name) => find(`[data-go=${name}]`);
    const totals = data.pairs.map((pair) => addTotal(find("tbody"), pair));

    let played = everything; // messages, by their place among all
    let step = 0; // how many of them have been sent
    let timer = null;

    function show() {
      const current = played[step - 1];
      const first = Math.max(0, step - MOST_ROWS);
      for (const row of rows) row.style.display = "none";
      played.slice(first, step).forEach((message, place) => {
        rows[message].style.display = "";
        rows[message].setAttribute("y", ROW_PX * place + 18);
      });
      rows.forEach((row, message) => row.classList.toggle("current", message === current));
      find(".mark").setAttribute("y", ROW_PX * (step - first - 1));
      find(".rows").setAttribute("height", ROW_PX * Math.max(1, Math.min(MOST_ROWS, played.length)) + 8);
      showWords(current);
      showTotals();
      for (const name of ["start", "back"]) button(name).disabled = step === 0;
      for (const name of ["forward", "end"]) button(name).disabled = step === played.length;
    }

    function showWords(current) {
      const position = `message ${step} of ${played.length}`;
      find(".position").textContent = position;
      slider.max = played.length;
      slider.value = step;
      slider.setAttribute("aria-valuetext", position);
      const nothing = played.length ? "Nothing is sent yet. Press Forward, or the right arrow key." : "No message.";
      find(".sentence").textContent = step ? sentences[current] : nothing;
      find(".sentence").style.borderColor = step ? data.colors[data.color[current]] : "";
    }

    function showTotals() {
      const counts = data.pairs.map(() => 0);
      const bytes = data.pairs.map(() => 0);
      // What never came was not sent, as far as anybody knows.
      for (const message of played.slice(0, step).filter((message) => data.came[message])) {
        counts[data.pair[message]] += 1;
        bytes[data.pair[message]] += data.bytes[message];
      }
      totals.forEach((row, pair) => fill(row, counts[pair], bytes[pair]));
      fill(find("tfoot tr"), sum(counts), sum(bytes));
    }

    function go(to) {
      const before = step;
      step = Math.max(0, Math.min(played.length, to));
      show();
      if (step !== before) root.dispatchEvent(new CustomEvent("dlearn-step", { bubbles: true, detail: { step } }));
      if (step === played.length) pause();
    }

    function play() {
      if (step === played.length) go(0);
      timer = setInterval(() => (root.isConnected ? go(step + 1) : pause()), PLAY_MS);
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
    slider.addEventListener("input", () => {
      pause();
      go(Number(slider.value));
    });

    const keys = { ArrowLeft: "back", ArrowRight: "forward", Home: "start", End: "end" };
    const alsoInPicture = { ArrowUp: "back", ArrowDown: "forward" };
    root.addEventListener("keydown", (event) => {
      const name = keys[event.key] ?? (event.target === picture && alsoInPicture[event.key]);
      if (!name || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      pause();
      moves[name]();
    });

    box.addEventListener("change", () => {
      const current = played[step - 1] ?? -1;
      played = box.checked ? carryData : everything;
      go(played.filter((message) => message <= current).length);
    });
    if (carryData.length < everything.length) {
      box.parentNode.hidden = false;
      box.nextElementSibling.textContent = `Hide control messages: ${carryData.length} of ${rows.length} carry data`;
    }

    picture.tabIndex = 0;
    picture.setAttribute("role", "group");
    picture.setAttribute("aria-label", "Sequence diagram. The arrow keys step through its messages.");
    find(".totals").tabIndex = 0;
    show();
    return {
      get step() {
        return step;
      },
      go(to) {
        pause();
        go(to);
      },
    };
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

  // A page may hold several players, each with a script of its own: whichever runs takes all that no other has taken.
  // Each is listed by its name, so that Python can find it (bridge.js).
  const mounted = (globalThis.dlearnPlayers ??= new Map());
  for (const root of document.querySelectorAll(".dlearn-player")) {
    if (root.dlearnPlayer) continue;
    root.dlearnPlayer = mount(root);
    const name = root.dataset.player;
    mounted.set(name, (mounted.get(name) ?? new Set()).add(root));
  }
})();
