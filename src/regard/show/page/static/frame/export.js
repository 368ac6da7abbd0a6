// Save the picture on screen as PNG, or as SVG with lines and text as vectors.

import { formatColor, readBackground } from "../drawing/color.js";
import { el } from "../drawing/elements.js";
import { createSvgPen } from "../drawing/canvas_pen.js";

const FINER = 2; // minimum pixels of a PNG per CSS pixel; the pixel ratio of the screen if that is larger
const [EDGE, LINE, LETTER] = [16, 19, 13]; // pixels: margin of the caption, line height, font size

// Create the menu that saves the picture of a view; picture() returns {svg or canvas, legend} of the mounted view.
export function createExporter(app, picture) {
  const save = (kind) => async () => {
    try {
      const shown = picture();
      if (!shown.svg && !shown.canvas) return app.fail("There is no picture to save yet.");
      const name = `regard-${app.state().view}.${kind}`;
      const svg = frameSvg(shown, document.getElementById("caption").textContent);
      return downloadBlob(kind === "svg" ? new Blob([svg], { type: "image/svg+xml" }) : await rasterizeSvg(svg), name);
    } catch (fault) {
      return app.fail(`The picture cannot be saved: ${fault.message}`);
    }
  };
  const chosen = (kind) => () => (close(), button.focus(), save(kind)());
  const items = el("div", { hidden: true, role: "menu", id: "save-menu" },
    el("button", { role: "menuitem", onclick: chosen("png") }, "PNG (pixels)"),
    el("button", { role: "menuitem", onclick: chosen("svg") }, "SVG (vectors)"));
  const button = el("button", { class: "quiet", "aria-haspopup": "menu", "aria-expanded": "false", "aria-controls": "save-menu", onclick: () => (items.hidden ? open() : close()) }, "Save", el("span", { class: "long" }, " picture"));
  const menu = el("div", { class: "menu" }, button, items);

  function open() {
    items.hidden = false;
    button.setAttribute("aria-expanded", "true");
    items.firstChild.focus();
  }

  function close() {
    items.hidden = true;
    button.setAttribute("aria-expanded", "false");
  }

  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !items.hidden) close(), button.focus(), event.stopPropagation();
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || items.hidden) return;
    const all = [...items.children];
    all.at((all.indexOf(document.activeElement) + by) % all.length).focus();
    event.preventDefault();
  });
  menu.addEventListener("focusout", (event) => menu.contains(event.relatedTarget) || close());
  document.addEventListener("pointerdown", (event) => menu.contains(event.target) || close());
  return menu;
}

// Return an SVG of a picture with its caption and its color scale.
function frameSvg({ svg, canvas, legend }, caption) {
  const inner = svg ?? embedCanvas(canvas);
  const [width, height] = ["width", "height"].map((side) => Number(inner.match(new RegExp(`^<svg[^>]* ${side}="([\\d.]+)"`))[1]));
  const lines = wrapText(caption, Math.max(width - 2 * EDGE, 200));
  const foot = EDGE + lines.length * LINE + (legend ? 44 : 0);
  const pen = createSvgPen(Math.max(width, legend?.signs ? 560 : legend ? 400 : 232), height + foot, readBackground("--paper"));
  pen.whole(inner);
  lines.forEach((line, n) => pen.text(line, EDGE, height + (n + 0.5) * LINE + 6, { size: LETTER, fill: readBackground("--ink") }));
  if (legend) drawScale(pen, legend, height + foot - 44);
  return pen.done();
}

function embedCanvas(canvas) {
  const { width, height } = canvas;
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}"><image width="${width}" height="${height}" href="${canvas.toDataURL()}"/></svg>\n`;
}

// Break a text into lines of at most `room` pixels.
function wrapText(text, room) {
  const ruler = el("canvas").getContext("2d");
  ruler.font = `${LETTER}px system-ui, sans-serif`;
  const lines = [];
  for (const word of text.split(/\s+/).filter(Boolean)) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && ruler.measureText(longer).width <= room) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

function drawScale(pen, { title, colour, ticks }, y) {
  const look = { size: 11, fill: readBackground("--faint") };
  const [left, steps, wide] = [EDGE, 60, 3];
  pen.text(title, left + wide * steps + 10, y + 12, look);
  for (let n = 0; n < steps; n++) pen.rect(left + wide * n, y + 6, wide + 0.3, 11, formatColor(colour(n / (steps - 1))));
  ticks.forEach(([place, text], n) => pen.text(text, left + place * wide * steps, y + 28, { ...look, anchor: n === 0 ? "start" : n === ticks.length - 1 ? "end" : "middle" }));
}

async function rasterizeSvg(svg) {
  const sheet = await loadImage(svg);
  return new Promise((resolve, reject) => sheet.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the browser returned no PNG."))), "image/png"));
}

// Draw an SVG on a canvas, at the resolution of the screen or above.
async function loadImage(svg) {
  const address = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const finer = Math.max(FINER, devicePixelRatio);
    const canvas = el("canvas", { width: Math.round(finer * image.naturalWidth), height: Math.round(finer * image.naturalHeight) });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return canvas;
  } finally {
    URL.revokeObjectURL(address);
  }
}

function downloadBlob(blob, name) {
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
