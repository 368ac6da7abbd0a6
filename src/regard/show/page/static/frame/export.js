// Save what is on screen: the picture as PNG or SVG, its numbers as CSV or JSON, and the HTML that embeds the page elsewhere.

import { formatColor, readBackground } from "../drawing/color.js";
import { el } from "../drawing/elements.js";
import { createSvgPen } from "../drawing/canvas_pen.js";
import { formatCsv, formatJson, writeEmbedding } from "./table_export.js";

const FINER = 2; // minimum pixels of a PNG per CSS pixel; the pixel ratio of the screen if that is larger
const [EDGE, LINE, LETTER] = [16, 19, 13]; // pixels: margin of the caption, line height, font size

// Create the menu that saves what a view shows; picture() returns {svg or canvas, legend} of the mounted view, table() its
// numbers as records.
export function createExporter(app, { picture, table }) {
  const getCaption = () => document.getElementById("caption").textContent;
  const saveTable = (kind) => async () => {
    try {
      const records = await table();
      if (!records?.length) return app.fail("There are no numbers to save yet.");
      const text = kind === "csv" ? formatCsv(records) : formatJson(app.state().view, getCaption(), location.href, records);
      return downloadBlob(new Blob([text], { type: kind === "csv" ? "text/csv" : "application/json" }), `regard-${app.state().view}.${kind}`);
    } catch (fault) {
      return app.fail(`The numbers cannot be saved: ${fault.message}`);
    }
  };
  const copyEmbedding = async () => {
    const text = writeEmbedding(location, document.title);
    try {
      await navigator.clipboard.writeText(text);
      return app.say("The HTML that embeds this page is copied.");
    } catch {
      return app.say(text); // to be copied by hand
    }
  };
  const save = (kind) => async () => {
    try {
      const shown = picture();
      if (!shown.svg && !shown.canvas) return app.fail("There is no picture to save yet.");
      const name = `regard-${app.state().view}.${kind}`;
      const svg = frameSvg(shown, getCaption());
      return downloadBlob(kind === "svg" ? new Blob([svg], { type: "image/svg+xml" }) : await rasterizeSvg(svg), name);
    } catch (fault) {
      return app.fail(`The picture cannot be saved: ${fault.message}`);
    }
  };
  const item = (text, work) => el("button", { role: "menuitem", onclick: () => (close(), button.focus(), work()) }, text);
  const items = el("div", { hidden: true, role: "menu", id: "save-menu" },
    item("PNG (pixels)", save("png")), item("SVG (vectors)", save("svg")), item("CSV (numbers)", saveTable("csv")), item("JSON (numbers)", saveTable("json")), item("Copy the HTML to embed", copyEmbedding));
  const button = el("button", { class: "quiet", "aria-haspopup": "menu", "aria-expanded": "false", "aria-controls": "save-menu", onclick: () => (items.hidden ? open() : close()) }, "Save");
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

// Draw an SVG on a canvas, at the resolution of the screen or above. It is loaded by a data: URL: the policy of a notebook around
// the page can refuse images from blob: URLs.
async function loadImage(svg) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  await image.decode();
  const finer = Math.max(FINER, devicePixelRatio);
  const canvas = el("canvas", { width: Math.round(finer * image.naturalWidth), height: Math.round(finer * image.naturalHeight) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas;
}

function downloadBlob(blob, name) {
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
