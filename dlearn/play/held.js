// The stage of a held job: what waits at the gate waits at the beginning of its wire, a receive at the end of it; a
// collective's on the way to the middle, as it is for all. Buttons act on the run, as long as a kernel is there to hear
// them (bridge.js). elements.js, pictures.js and stage.js, which draw, stand before it in the same function.

const MOST_WAITING = 3; // calls of one rank that are drawn; of more it is told how many they are
const AT_GATE = 0.25; // of the way
const BELOW = 26; // a receive's label, so that it does not cover that of what is sent to it
const SHORT = 200; // a wire on which labels that stand in the middle of their packets would meet: they stand outwards

function drawGate(place, state, id) {
  place.replaceChildren();
  const data = { lanes: state.lanes, stage: state.stage };
  const { svg, stage, width, path, wire } = addStage(place, data, id, 12, "Ranks, and the calls that wait; they are told in words below");
  const { spots } = stage;
  const middle = [0, 1].map((axis) => spots.reduce((sum, spot) => sum + spot[axis], 0) / spots.length);
  const toAll = new Set(state.waiting.filter(({ to }) => to === null).map(({ rank }) => rank));
  for (const [src, dst] of stage.pairs) {
    const used = state.waiting.some((call) => (call.receives ? call.to === src && call.rank === dst : call.rank === src && call.to === dst));
    wire(path(src, dst), used ? "used" : "");
  }
  const inwards = (rank) => [wireBetween(spots[rank], middle, stage, false)[0], middle];
  for (const rank of toAll) wire(inwards(rank), "used");
  if (toAll.size) add(svg, "circle", { class: "box", cx: middle[0], cy: middle[1], r: 7 });
  data.lanes.forEach((name, lane) => {
    const box = drawBox(svg, name, lane, spots[lane], { data, stage, now: undefined, sent: [] });
    const text = shortened(state.now[lane], stage.wide / 6);
    if (stage.wide >= 60) add(box, "text", { class: "doing", y: 4 }, text);
  });
  for (const [lane] of data.lanes.entries()) {
    const calls = state.waiting.filter(({ rank }) => rank === lane);
    calls.slice(0, MOST_WAITING).forEach((call, n) => {
      const ends = call.receives ? [call.to, lane] : [lane, call.to];
      const way = call.to === null || call.to === lane ? inwards(lane) : path(...ends);
      const packet = drawPacket(svg, { how: call.receives ? "awaited" : "observed", bytes: call.bytes, color: "" }, new Set(), data, true, false);
      add(packet, "title", {}, `${call.op}${call.site ? ` (${call.site})` : ""}`);
      const more = n === MOST_WAITING - 1 && calls.length > MOST_WAITING ? `, and ${calls.length - MOST_WAITING} more` : "";
      const label = packet.querySelector("text");
      label.textContent = `${call.op} ${sizeText(call.bytes)}${more}`;
      if (call.receives) label.setAttribute("y", BELOW);
      const [across, down] = [way[1][0] - way[0][0], way[1][1] - way[0][1]];
      if (call.to !== null && Math.abs(across) < SHORT && Math.abs(down) > 1) {
        label.style.textAnchor = across > 0 === call.receives ? "start" : "end";
      }
      put(packet, way, (call.receives && call.to !== null ? 1 - AT_GATE : AT_GATE) + 0.22 * n * (call.receives ? -1 : 1), width);
    });
  }
}

function mountHeld(root, state) {
  const bar = root.querySelector(".bar");
  const id = `dlearn-held-${root.dataset.held}`;
  root.querySelector(".told").remove();
  const ask = (act, rank = null) => root.dispatchEvent(new CustomEvent("dlearn-held", { bubbles: true, detail: { act, rank } }));
  let shown = state;

  function button(parent, text, act, rank) {
    add(parent, "button", { type: "button", "data-act": act, ...(rank === undefined ? {} : { "data-rank": rank }) }, text).addEventListener("click", () => ask(act, rank));
  }

  function drawBar(now, live) {
    bar.replaceChildren();
    const buttons = add(bar, "div", { class: "buttons" });
    if (live && now.state === "held") {
      button(buttons, "Step", "step");
      now.lanes.forEach((name, rank) => now.waiting.some((call) => call.rank === rank) && button(buttons, `Release ${name}`, "release", rank));
      button(buttons, "Free", "free");
    }
    const told = { held: live ? "" : " (as it was: no kernel answers)", open: " (the gate is open)", over: " (it has ended)" }[now.state];
    add(buttons, "span", { class: "position" }, `${now.waiting.length} wait at the gate, ${now.passed} let through${told}`);
  }

  function show(now, live) {
    const act = document.activeElement?.dataset?.act; // It is drawn anew: who steps by keyboard goes on.
    const rank = document.activeElement?.dataset?.rank;
    const mine = root.contains(document.activeElement);
    shown = now;
    drawBar(now, live);
    drawGate(root.querySelector(".picture"), now, id);
    root.querySelector(".sentence").textContent = now.last;
    root.querySelector(".hang").textContent = now.hang;
    if (mine && act) bar.querySelector(`[data-act="${act}"]${rank === undefined ? "" : `[data-rank="${rank}"]`}`)?.focus();
  }

  register(root.dataset.held, root, (now) => show(now, true));
  show(state, false);
  new ResizeObserver(() => drawGate(root.querySelector(".picture"), shown, id)).observe(root);
}

mountAll("held", mountHeld);
