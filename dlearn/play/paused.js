// The stage of a paused job: a call that waits at the gate stands at its sender's rim, a receive at the receiver's, a
// collective on the way to the middle. A click on it lets it through, as long as a kernel answers (bridge.js).
// elements.js, pictures.js and stage.js, which draw, stand before it in the same function.

const MOST_WAITING = 3; // calls of one rank that are drawn; its box says how many there are
const APART = 24; // pixels from call to call
const LEAST_WIDE = 44; // a box with room for words

function drawGate(parent, state, id, isHeld) {
  parent.replaceChildren();
  const { stage } = state;
  const svg = addStage(parent, stage, id, 12, "Ranks, and the calls that wait");
  svg.setAttribute("role", "group");
  const red = new Set(state.hung.map((wire) => wireOf(stage, ...wire)));
  const used = new Set(state.waiting.map(({ wire }) => wireOf(stage, ...wire)));
  for (const wire of stage.wires) {
    addWire(svg, id, wire.ends, (red.has(wire) && "missing") || (used.has(wire) && "used") || "");
  }
  const toAll = stage.wires.find(({ dst }) => dst < 0);
  if (toAll) add(svg, "circle", { class: "box", cx: toAll.ends[1][0], cy: toAll.ends[1][1], r: 7 });
  state.lanes.forEach((name, lane) => {
    const never = state.guilty.filter((rank) => !state.inside.includes(rank));
    const hung = stage.wide >= LEAST_WIDE ? [state.inside, never] : [[], []];
    const box = drawBox(svg, name, lane, { stage, now: { hung }, sent: [] });
    box.parentNode.classList.toggle("absent", state.guilty.includes(lane));
    const calls = state.waiting.filter(({ rank }) => rank === lane);
    const more = calls.length > 1 ? ` and ${calls.length - 1} more` : "";
    const words = calls.slice(0, 1).flatMap(({ op, bytes, site }) => [op + more, sizeText(bytes), site]);
    if (stage.wide >= LEAST_WIDE) drawWords(box, words.length ? words : [state.now[lane]], stage);
    calls.slice(0, MOST_WAITING).forEach((call, number) => {
      const packet = drawWaiting(svg, state, call, number);
      const label = `Release ${name}'s ${call.op} #${call.number}, ${sizeText(call.bytes)}`;
      const names = { role: "button", tabindex: 0, "data-act": "release", "data-rank": lane, "aria-label": label };
      for (const [key, value] of Object.entries(isHeld && !number ? names : {})) packet.setAttribute(key, value);
    });
  });
}

function drawWaiting(svg, state, call, number) {
  const [how, { ends }] = [call.op === "recv" ? "awaited" : "observed", wireOf(state.stage, ...call.wire)];
  const packet = drawPacket(svg, { how, bytes: call.bytes, color: call.color }, state, [], false);
  add(packet, "title", {}, `${call.op}${call.site ? ` (${call.site})` : ""}`);
  const [from, to] = call.wire[0] !== call.rank ? [...ends].reverse() : ends;
  const side = Number(packet.querySelector("rect").getAttribute("width"));
  const far = Math.hypot(to[0] - from[0], to[1] - from[1]) || 1;
  put(packet, [from, to], Math.min(1, (side / 2 + APART * number) / far));
  return packet;
}

function mountPaused(root, state) {
  const [bar, picture] = [".bar", ".picture"].map((name) => root.querySelector(name));
  let [shown, width] = [[state, false], 0];
  root.querySelector(".listed").remove();

  function asked(event) {
    const { act, rank = null } = event.target.closest("[data-act]")?.dataset ?? {};
    const isKey = rank && [" ", "Enter"].includes(event.key); // It clicks a button by itself, but no packet.
    if (!act || (event.type === "keydown" && !isKey)) return;
    event.preventDefault(); // The page would scroll.
    const detail = { act, rank: rank && Number(rank), op: bar.querySelector("select").value };
    root.dispatchEvent(new CustomEvent("dlearn-paused", { bubbles: true, detail }));
  }

  function drawBar(now, isHeld, live) {
    const chosen = bar.querySelector("select")?.value;
    bar.replaceChildren();
    const buttons = add(bar, "div", { class: "buttons" });
    for (const act of isHeld ? ["step", "free", "until"] : []) {
      add(buttons, "button", { type: "button", "data-act": act }, act);
    }
    const ops = add(buttons, "select", { "aria-label": "Let calls through until one of this op waits" });
    for (const op of now.ops) add(ops, "option", op === chosen ? { selected: "" } : {}, op);
    ops.hidden = !isHeld;
    const hint = now.waiting.length ? ": click a call to release it" : "";
    const words = { paused: live ? hint : " (as it was: no kernel answers)", open: " (the gate is open)" };
    add(buttons, "span", { class: "position" }, now.position + (words[now.state] ?? ""));
  }

  function show(now, live) {
    [shown, width] = [[now, live], picture.clientWidth];
    const { act, rank } = root.contains(document.activeElement) ? document.activeElement.dataset : {};
    const isHeld = live && now.state === "paused";
    drawBar(now, isHeld, live);
    drawGate(picture, now, `dlearn-paused-${root.dataset.paused}`, isHeld);
    root.querySelector(".sentence").textContent = now.last;
    root.querySelector(".hang").textContent = now.hang;
    // The buttons are new: one that had the keyboard has it again, or else the picture.
    if (act) (root.querySelector(`[data-act=${act}]${rank ? `[data-rank="${rank}"]` : ""}`) ?? picture).focus();
  }

  register(root.dataset.paused, root, (now) => show(now, true));
  for (const kind of ["click", "keydown"]) root.addEventListener(kind, asked);
  new ResizeObserver(() => picture.clientWidth === width || show(...shown)).observe(picture);
  show(state, false);
}

mountAll("paused", mountPaused);
