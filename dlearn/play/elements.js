// What the scripts of all pages share: elements, sizes in words, and the data that a page holds, unpacked.

// Text is only ever set as text: whatever a rank is called, it cannot become markup.
function add(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return parent.appendChild(made);
}

function sizeText(bytes) {
  if (bytes === null) return "? B";
  for (const [unit, scale] of [["B", 1], ["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12]]) {
    const number = bytes / scale;
    if (number < 999.5 || unit === "TB") return `${unit === "B" ? number : number.toPrecision(3)} ${unit}`;
  }
}

async function unpackBytes(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// A page may hold several of a kind, each with a script of its own: whichever runs takes all that no other has taken.
// Where a browser cannot do it, the still picture and the words stay, and the page says why.
function mountAll(selector, taken, mount) {
  for (const root of document.querySelectorAll(selector)) {
    if (root[taken]) continue;
    root[taken] = true;
    const packed = root.querySelector("script[type='application/dlearn']").textContent;
    unpackBytes(packed).then((bytes) => mount(root, bytes)).catch((error) => {
      root.querySelector(".bar").textContent = `This browser cannot show it (${error}).`;
    });
  }
}
