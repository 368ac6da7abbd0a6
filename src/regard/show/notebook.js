// Pictures of attention in a notebook: a click enlarges one, wheel and drag move in it, the pointer tells what lies under it.

function wire(root) {
  root.dataset.wired = "yes";
  const words = JSON.parse(root.dataset.words);
  const said = root.querySelector(".regard-said");
  const images = root.querySelectorAll("img[data-frame]");
  const rest = `${said.textContent} ${images.length > 1 ? "A click makes one larger." : "A click makes it larger."}`;
  said.textContent = rest;
  for (const image of images) {
    const view = { large: false, zoom: 1, x: 0, y: 0, small: image.style.width };
    const draw = () => place(image, view);
    image.tabIndex = 0;
    image.setAttribute("role", "button");
    image.style.cursor = "zoom-in";
    image.addEventListener("pointermove", (event) => { said.textContent = describeSpot(image, words, event) || rest; });
    image.addEventListener("pointerleave", () => { said.textContent = rest; });
    image.addEventListener("wheel", (event) => { if (view.large) { zoom(image, view, event); draw(); } }, { passive: false });
    image.addEventListener("keydown", (event) => { if (handleKey(view, event.key)) { event.preventDefault(); draw(); } });
    drag(image, view, draw);
  }
}

function place(image, view) {
  const frame = image.parentElement;
  image.style.width = view.large ? "100%" : view.small;
  frame.style.width = view.large ? `${Math.min(720, frame.closest("[data-words]").clientWidth)}px` : "";
  const edge = (at, size) => Math.min(0, Math.max(at, size * (1 - view.zoom)));
  view.x = edge(view.x, image.clientWidth);
  view.y = edge(view.y, image.clientHeight);
  image.style.transformOrigin = "0 0";
  image.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.zoom})`;
  image.style.cursor = view.large ? "move" : "zoom-in";
}

function zoom(image, view, event) {
  event.preventDefault();
  const next = Math.min(40, Math.max(1, view.zoom * Math.exp(-event.deltaY / 300)));
  const box = image.parentElement.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  view.x = x - (x - view.x) * next / view.zoom;
  view.y = y - (y - view.y) * next / view.zoom;
  view.zoom = next;
}

function handleKey(view, key) {
  const steps = { "+": 1.5, "-": 1 / 1.5 };
  const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
  if (key === "Enter" || key === " ") toggle(view);
  else if (key === "Escape" && view.large) toggle(view);
  else if (view.large && steps[key]) view.zoom = Math.min(40, Math.max(1, view.zoom * steps[key]));
  else if (view.large && moves[key]) { view.x += moves[key][0]; view.y += moves[key][1]; }
  else return false;
  return true;
}

function toggle(view) {
  Object.assign(view, { large: !view.large, zoom: 1, x: 0, y: 0 });
}

function drag(image, view, draw) {
  let from = null;
  image.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    image.focus({ preventScroll: true });
    image.setPointerCapture(event.pointerId);
    from = { x: event.clientX - view.x, y: event.clientY - view.y, moved: false };
  });
  image.addEventListener("pointermove", (event) => {
    if (!from || !view.large) return;
    from.moved ||= Math.hypot(event.clientX - from.x - view.x, event.clientY - from.y - view.y) > 4;
    if (from.moved) { view.x = event.clientX - from.x; view.y = event.clientY - from.y; draw(); }
  });
  image.addEventListener("pointerup", () => {
    if (from && !from.moved) { toggle(view); draw(); }
    from = null;
  });
}

// What lies under the pointer: the words, and the weight that its colour stands for.
function describeSpot(image, words, event) {
  const frame = JSON.parse(image.dataset.frame);
  const x = event.offsetX / image.clientWidth * frame.width, y = event.offsetY / image.clientHeight * frame.height;
  const column = Math.floor((x - frame.x) / frame.w * frame.columns), row = Math.floor((y - frame.y) / frame.h * frame.rows);
  if (column < 0 || row < 0 || column >= frame.columns || row >= frame.rows) return "";
  const spot = { column, row, name: image.alt };
  if (frame.tile && !inside(frame, spot)) return "";
  const share = shareOf(RAMPS[frame.ramp], dot(image, frame, ...clear(frame, column, row)));
  const value = share === null ? (frame.ramp === "signed" ? "not a number" : "not seen") : `${frame.stands}≈ ${number(valueAt(share, frame))}`;
  const list = (name) => words[frame[name]] || [];
  return `${spot.name}: ${axis(frame.names[0], spot.row, spot.of?.[0] ?? frame.rows, frame.q, list("rowWords"))} → ` +
    `${axis(frame.names[1], spot.column, spot.of?.[1] ?? frame.columns, frame.k, list("columnWords"))}: ${value}`;
}

// A sheet of many heads: which one, and where in it; false between two.
function inside(frame, spot) {
  const [high, wide] = frame.tile;
  const head = Math.floor(spot.column / (wide + 1)), layer = Math.floor(spot.row / (high + 1));
  spot.column -= head * (wide + 1);
  spot.row -= layer * (high + 1);
  spot.name = `${frame.tileWords[0][layer]}, ${frame.tileWords[1][head]}`;
  spot.of = frame.tile;
  return spot.column < wide && spot.row < high;
}

function axis(name, bin, bins, count, words) {
  const first = Math.floor(bin * count / bins), last = Math.floor((bin + 1) * count / bins) - 1;
  const word = words[first] === undefined ? "" : ` “${words[first].trim() || words[first]}”`;
  return last > first ? `${name} ${first} to ${last}` : `${name} ${first}${word}`;
}

// Where a cell shows its colour alone: near its corner if it is large enough to have its number in the middle.
function clear(frame, column, row) {
  const [wide, high] = [frame.w / frame.columns, frame.h / frame.rows];
  const at = Math.min(wide, high) > 12 ? 0.12 : 0.5;
  return [frame.x + (column + at) * wide, frame.y + (row + at) * high];
}

// The colour of the picture at a place of it, drawn once at three dots a cell or more.
function dot(image, frame, x, y) {
  const fine = Math.max(1, Math.ceil(3 * frame.columns / frame.w));
  if (!image.drawn) {
    const canvas = document.createElement("canvas");
    canvas.width = frame.width * fine;
    canvas.height = frame.height * fine;
    image.drawn = canvas.getContext("2d", { willReadFrequently: true });
    image.drawn.drawImage(image, 0, 0, canvas.width, canvas.height);
  }
  return image.drawn.getImageData(Math.floor(x * fine), Math.floor(y * fine), 1, 1).data;
}

// How far along the ramp the nearest colour lies; null on paper, where nothing is seen.
function shareOf(ramp, [red, green, blue]) {
  let best = null, least = 60;
  ramp.forEach(([r, g, b], n) => {
    const apart = (r - red) ** 2 + (g - green) ** 2 + (b - blue) ** 2;
    if (apart < least) { least = apart; best = n / (ramp.length - 1); }
  });
  return best;
}

function valueAt(share, frame) {
  const [low, high] = frame.ends;
  if (frame.ramp === "signed" && frame.log) {
    const distance = 2 * share - 1; // over four decades on each side of 0
    return Math.sign(distance) * high * 10 ** (4 * (Math.abs(distance) - 1));
  }
  return frame.log ? low * (high / low) ** share : low + share * (high - low);
}

function number(value) {
  return Math.abs(value) >= 0.0995 ? value.toFixed(2) : value === 0 ? "0" : value.toPrecision(2);
}

for (const root of document.querySelectorAll(".regard[data-words]:not([data-wired])")) wire(root);
