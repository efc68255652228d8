// What the scripts of all pages share: elements, sizes in words, and the packed facts of a page.

// Text is only ever set as text: whatever a rank is called, it cannot become markup.
function add(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS(name === "svg" ? "http://www.w3.org/2000/svg" : parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return parent.appendChild(made);
}

const SIZES = [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12]];
const TIMES = [["µs", 1e3], ["ms", 1e6], ["s", 1e9]];
const unitOf = (number, units) => units.find(([, scale]) => number < 999.5 * scale) ?? units.at(-1);
function inUnits(number, units) {
  const [unit, scale] = unitOf(number, units);
  const isWhole = scale === 1 || number >= 999.5 * scale; // bytes, and what has no larger unit
  const many = number / scale;
  return `${isWhole ? Math.round(many).toLocaleString("en-US") : many.toPrecision(3)} ${unit}`;
}
const sizeText = (bytes) => (bytes === null ? "? B" : inUnits(bytes, SIZES));
const timeText = (ns) => inUnits(ns, TIMES);

// The JSON's length, the JSON, and its `columns`, each number in four bytes (page.py packs them).
async function unpack(packed) {
  const compressed = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const block = await new Response(stream).arrayBuffer();
  let at = 4 + new DataView(block).getUint32(0, true);
  const facts = JSON.parse(new TextDecoder().decode(new Uint8Array(block, 4, at - 4)));
  for (const [name, length] of Object.entries(facts.columns)) {
    facts[name] = new Int32Array(block, at, length);
    at += 4 * length;
  }
  return facts;
}

// Let bridge.js find it: `show` takes Python's state, and returns the step of a player.
function register(name, root, show) {
  root.dlearnShow = show;
  const pages = (globalThis.dlearnPages ??= new Map());
  pages.set(name, (pages.get(name) ?? new Set()).add(root));
}

// A page may hold several of a kind, each with a script of its own: the first that runs mounts all that are there.
// Where a browser cannot do it, the still picture and the words stay, and the page says why.
function mountAll(kind, mount) {
  for (const root of document.querySelectorAll(`.dlearn-player[data-${kind}]`)) {
    if (root.dlearnMounted) continue;
    root.dlearnMounted = true;
    const packed = root.querySelector("script[type='application/dlearn']").textContent;
    unpack(packed).then((facts) => mount(root, facts)).catch((error) => {
      root.querySelector(".bar").textContent = `This browser cannot show it (${error}).`;
    });
  }
}
