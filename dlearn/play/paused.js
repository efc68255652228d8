// The stage of a paused job: a call that waits at the gate waits at the beginning of its wire, a receive at the end
// of it, a collective on the way to the middle. Buttons act on the run, as long as a kernel answers (bridge.js).
// elements.js, pictures.js and stage.js, which draw, stand before it in the same function.

const MOST_WAITING = 3; // calls of one rank that are drawn; of more, the last label says how many
const AT_GATE = 0.25; // of the way
const BELOW = 26; // a receive's label, so that it does not cover that of what is sent to it

function drawGate(parent, state, id) {
  parent.replaceChildren();
  const { stage, lanes, waiting } = state;
  const label = "Ranks, and the calls that wait; they are told in words below";
  const svg = addStage(parent, stage, id, 12, label);
  const wireOfCall = ({ rank, to, receives }) => {
    return receives && to >= 0 ? wireOf(stage, to, rank) : wireOf(stage, rank, to);
  };
  const used = new Set(waiting.map(wireOfCall));
  for (const wire of stage.wires) addWire(svg, id, wire.ends, used.has(wire) ? "used" : "");
  const toAll = stage.wires.find(({ dst }) => dst < 0);
  if (toAll) add(svg, "circle", { class: "box", cx: toAll.ends[1][0], cy: toAll.ends[1][1], r: 7 });
  lanes.forEach((name, lane) => {
    const box = drawBox(svg, name, lane, { stage, now: undefined, sent: [] });
    const doing = shortened(state.now[lane], stage.wide / 6);
    if (stage.wide >= 60) add(box, "text", { class: "doing", y: 4 }, doing);
    const calls = waiting.filter(({ rank }) => rank === lane);
    calls.slice(0, MOST_WAITING).forEach((call, number) => {
      const isLast = number === MOST_WAITING - 1 && calls.length > MOST_WAITING;
      const more = isLast ? `, and ${calls.length - MOST_WAITING} more` : "";
      drawWaiting(svg, state, call, number, more, wireOfCall(call).ends);
    });
  });
}

function drawWaiting(svg, state, call, number, more, ends) {
  const how = call.receives ? "awaited" : "observed";
  const packet = drawPacket(svg, { how, bytes: call.bytes, color: "" }, state, [], false);
  add(packet, "title", {}, `${call.op}${call.site ? ` (${call.site})` : ""}`);
  const label = packet.querySelector("text");
  label.textContent = `${call.op} ${sizeText(call.bytes)}${more}`;
  if (call.receives) label.setAttribute("y", BELOW);
  const along = AT_GATE + 0.22 * number;
  put(packet, ends, call.receives && call.to >= 0 ? 1 - along : along, state.stage);
}

function mountPaused(root, state) {
  const bar = root.querySelector(".bar");
  const id = `dlearn-paused-${root.dataset.paused}`;
  root.querySelector(".listed").remove();

  function button(parent, text, act, rank = null) {
    const names = rank === null ? {} : { "data-rank": rank };
    const made = add(parent, "button", { type: "button", "data-act": act, ...names }, text);
    const detail = { act, rank };
    const asked = () => root.dispatchEvent(new CustomEvent("dlearn-paused", { bubbles: true, detail }));
    made.addEventListener("click", asked);
  }

  function drawBar(now, live) {
    bar.replaceChildren();
    const buttons = add(bar, "div", { class: "buttons" });
    if (live && now.state === "paused") {
      button(buttons, "Step", "step");
      now.lanes.forEach((name, lane) => {
        const waits = now.waiting.some(({ rank }) => rank === lane);
        if (waits) button(buttons, `Release ${name}`, "release", lane);
      });
      button(buttons, "Free", "free");
    }
    const asItWas = live ? "" : " (as it was: no kernel answers)";
    const words = { paused: asItWas, open: " (the gate is open)", over: " (it has ended)" }[now.state];
    const counts = `${now.waiting.length} wait at the gate, ${now.passed} let through`;
    add(buttons, "span", { class: "position" }, counts + words);
  }

  function show(now, live) {
    const focused = root.contains(document.activeElement) ? document.activeElement.dataset : {};
    drawBar(now, live);
    drawGate(root.querySelector(".picture"), now, id);
    root.querySelector(".sentence").textContent = now.last;
    root.querySelector(".hang").textContent = now.hang;
    // The buttons are new: one that had the keyboard has it again.
    const buttons = [...bar.querySelectorAll("button")];
    buttons.find(({ dataset: { act, rank } }) => act === focused.act && rank === focused.rank)?.focus();
  }

  register(root.dataset.paused, root, (now) => show(now, true));
  show(state, false);
}

mountAll("paused", mountPaused);
