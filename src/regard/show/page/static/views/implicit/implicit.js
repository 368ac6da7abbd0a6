// The view of layers without a softmax: the signed matrix of a head, in colors around 0, and its single entries.

import { chooseScaleName, roundUp, shadeSigned } from "../../drawing/color.js";
import { createPixelCanvas, paintNumbers } from "../../drawing/matrix_image.js";
import { snapshotAsSvg } from "../../drawing/svg_snapshot.js";
import { makeSignedScale, shareSigned } from "../../drawing/legend.js";
import { formatCount, formatSigned } from "../../drawing/number_format.js";
import { quoteWord } from "../../drawing/words.js";
import { chooseImplicitLayer, isPooled } from "../../frame/implicit_controls.js";
import { measureLabels, renderLabels } from "./axis_labels.js";

const LEAST = 24; // CSS pixels along the shorter side of a picture
const NARROW = 560; // pixels of a sheet
const SIGNS = "Entries are signed, and rows need not sum to 1: these are no attention weights.";
const POINT = "Point at an entry, or select one with the arrow keys.";
const POOLED = { mean: "signed mean", max: "entry largest in size" };

export const view = {
  name: "implicit",
  title: "No softmax",
  question: "What do the layers without a softmax mix?",
  bar: ["implicitText", "channel", "pooling", "scale"],
  mount,
};

// Return whether a recording has layers without a softmax, so that this view can be shown.
export const hasImplicit = (summary) => Boolean(summary?.implicit?.length);

// `it` is the state that the functions below share: the parts of the page; the name of the picture and its numbers; the entry
// under the pointer; the requests under way.
function mount(stage, app) {
  stage.classList.add("implicit");
  const canvas = createPixelCanvas({ tabindex: 0, role: "application", "aria-label": "Matrix. Arrow keys move by one entry." });
  const mark = app.el("div", { class: "implicit-mark", hidden: true });
  const plot = app.el("div", { class: "implicit-plot" }, canvas, mark);
  const [rows, columns] = ["rows", "columns"].map((axis) => app.el("div", { class: `implicit-${axis}`, "aria-hidden": "true" }));
  const sheet = app.el("div", { class: "implicit-sheet" }, rows, columns, plot);
  const layers = app.el("div", { class: "implicit-layers", role: "group", "aria-label": "Layers without a softmax" });
  const entry = app.el("div", { class: "implicit-entry", role: "status", "aria-label": "Entry" });
  stage.append(sheet, app.el("aside", { class: "implicit-side" }, entry, app.el("p", { class: "note" }, SIGNS), app.el("h2", {}, "Without a softmax"), layers));
  const it = { app, canvas, mark, sheet, plot, rows, columns, layers, entry, name: "", numbers: null, hovered: null, asking: null, cell: null };
  const watch = new ResizeObserver(() => placePicture(it));
  watch.observe(sheet);
  listenToPointer(it);
  return { draw: (state) => drawView(it, state), leave: () => leaveView(it, watch), keys: listKeys(it), hands: HANDS, picture: () => ({ svg: it.numbers && snapshotAsSvg(sheet) }), table: () => listNumbers(it) };
}

const getLayer = ({ app }) => chooseImplicitLayer(app.summary(), app.state());
const getHow = (state, layer) => (isPooled(layer) && state.how === "max" ? "max" : "mean");
const getPlace = (state) => ({ layer: state.mixer, b: state.b, head: state.channel });

// Draw the picture of the head of a state; only the answer to the last request is shown.
async function drawView(it, state) {
  const { app } = it;
  const layer = getLayer(it);
  const query = { ...getPlace(state), how: getHow(state, layer) };
  listLayers(it, state);
  const name = JSON.stringify([app.summary().id, query]);
  if (name === it.name) return paint(it, state);
  it.name = name;
  it.asking?.abort();
  const control = (it.asking = new AbortController());
  app.wait("Computing the matrix of this head");
  try {
    const [numbers] = await Promise.all([app.source.implicit(app.summary().id, query, control.signal), layer.words && app.words(layer.words, 0, layer.keys)]);
    if (control !== it.asking) return null;
    app.ready();
    it.numbers = numbers;
    return paint(it, app.state());
  } catch (fault) {
    if (fault.name === "AbortError") return null;
    it.name = "";
    it.numbers = null;
    it.plot.hidden = it.rows.hidden = it.columns.hidden = true;
    app.ready();
    app.fail(fault.message);
    return null;
  }
}

// Color the pixels, and say what they are.
function paint(it, state) {
  const { app, numbers, canvas } = it;
  if (!numbers) return;
  const layer = getLayer(it);
  const high = roundUp(numbers.reduce((most, value) => (Number.isFinite(value) && Math.abs(value) > most ? Math.abs(value) : most), 0));
  const scale = { name: chooseScaleName(state, layer.keys), high };
  const shown = Array.from(numbers, (value) => (Number.isNaN(value) ? null : value));
  paintNumbers(canvas, shown, layer.rows, layer.columns, (value) => shadeSigned(shareSigned(scale, value)));
  it.plot.hidden = it.rows.hidden = it.columns.hidden = false;
  placePicture(it);
  const pixel = isPooled(layer) ? `, ${POOLED[getHow(state, layer)]} of each pixel` : "";
  app.legend(makeSignedScale(scale, { title: `signed entries${pixel}, whose rows need not sum to 1`, raises: "above 0", lowers: "below 0" }));
  app.caption(app.el("b", {}, `${layer.name}, head ${state.channel}`), ` · ${layer.title}, no softmax · entry i, j multiplies the value of key j (column) in the output of query i (row)${pixel}`);
  showEntry(it);
}

// Scale the picture to its sheet, with the words or numbers of the tokens beside it, and mark the selected entry.
function placePicture(it) {
  const layer = getLayer(it);
  if (!it.numbers || !layer) return;
  const room = it.sheet.getBoundingClientRect();
  const { left, top, each, isWordy } = measureLabels(room, layer);
  const fit = (tokens, most) => Math.min(Math.max(tokens * each, LEAST), most);
  const [width, height] = [fit(layer.keys, room.width - left), fit(layer.queries, room.height - top)];
  Object.assign(it.plot.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
  labelAxes(it, layer, { left, top, width, height, isWordy, most: room.width < NARROW ? 8 : 13 });
  const at = findEntry(it);
  it.mark.hidden = !at;
  for (const [axis, chosen] of [[it.rows, at?.q], [it.columns, at?.k]]) for (const label of axis.children) label.classList.toggle("chosen", label.dataset.n === String(chosen));
  if (!at) return;
  const [wide, high] = [width / layer.keys, height / layer.queries];
  const [w, h] = [Math.max(wide, 6), Math.max(high, 6)];
  Object.assign(it.mark.style, { left: `${(at.k + 0.5) * wide - w / 2}px`, top: `${(at.q + 0.5) * high - h / 2}px`, width: `${w}px`, height: `${h}px` });
}

// Write the labels of both axes; they stay as long as the picture is the same.
function labelAxes(it, layer, { left, top, width, height, isWordy, most }) {
  const name = JSON.stringify([it.name, left, width, height, layer.words]);
  if (name === it.labelled) return;
  it.labelled = name;
  const write = (place) => (layer.words && it.app.word(layer.words, place)) || formatCount(place);
  it.rows.replaceChildren(...renderLabels("rows", { count: layer.queries, size: height / layer.queries, room: left, isWordy, most, offset: layer.offset }, (n) => write(n + layer.offset)));
  it.columns.replaceChildren(...renderLabels("columns", { count: layer.keys, size: width / layer.keys, room: top, isWordy, most, offset: 0 }, write));
  Object.assign(it.rows.style, { top: `${top}px`, width: `${left - 8}px` });
  Object.assign(it.columns.style, { left: `${left}px`, height: `${top - 6}px` });
}

// Return the entry under the pointer, or the selected one.
function findEntry(it) {
  const { q, k } = it.app.state();
  return it.hovered ?? (q === undefined || k === undefined ? null : { q, k });
}

// Say the entry that is pointed at or selected, with its two words.
async function showEntry(it) {
  const { app, entry } = it;
  placePicture(it);
  const at = it.numbers && findEntry(it);
  it.cell?.abort();
  if (!at) return entry.replaceChildren(app.el("p", { class: "note" }, app.inUnits(POINT)));
  const [layer, state] = [getLayer(it), app.state()];
  const value = it.numbers[findPixel(at.q, layer.rows, layer.queries) * layer.columns + findPixel(at.k, layer.columns, layer.keys)];
  const say = (found) => app.el("p", { class: "implicit-value numbers", title: found === undefined ? null : String(found) }, found === undefined ? "…" : formatEntry(found));
  const places = app.el("p", {}, "query ", nameToken(it, at.q + layer.offset, at.q), ", key ", nameToken(it, at.k, at.k));
  if (!isPooled(layer)) return entry.replaceChildren(say(value), places);
  const pixel = app.el("p", { class: "note" }, `Its pixel, ${POOLED[getHow(state, layer)]}: `, app.el("span", { class: "numbers implicit-pixel", title: String(value) }, formatEntry(value)));
  entry.replaceChildren(say(undefined), places, pixel);
  const control = (it.cell = new AbortController());
  try {
    const found = await app.source.implicitCell(app.summary().id, { ...getPlace(state), ...at }, control.signal);
    if (control === it.cell) entry.replaceChildren(say(found.entry ?? NaN), places, pixel);
  } catch (fault) {
    if (fault.name !== "AbortError" && control === it.cell) entry.replaceChildren(places, pixel, app.el("p", { class: "note" }, fault.message));
  }
  return null;
}

const formatEntry = (value) => (Number.isNaN(value) ? "no finite number" : formatSigned(value));

// Return the pixel that covers a token: the first one whose last token is not before it.
const findPixel = (token, pixels, tokens) => Math.ceil(((token + 1) * pixels) / tokens) - 1;

// Return a token's word and place.
function nameToken({ app }, place, number) {
  const { words } = chooseImplicitLayer(app.summary(), app.state());
  const word = words && app.word(words, place);
  return word ? [app.el("b", {}, quoteWord(word)), ` at ${formatCount(number)}`] : app.el("b", {}, formatCount(number));
}

// List the layers without a softmax; the buttons stay as long as the recording is the same.
function listLayers({ app, layers }, state) {
  const { id, implicit } = app.summary();
  if (layers.dataset.of !== id) {
    layers.dataset.of = id;
    layers.replaceChildren(...implicit.map((one, n) =>
      app.el("button", { onclick: () => app.go({ mixer: n, channel: null }) }, app.el("b", {}, one.name), app.el("span", {}, `${one.title}, ${one.heads === 1 ? "1 head" : `${formatCount(one.heads)} heads`}`))));
  }
  [...layers.children].forEach((button, n) => button.setAttribute("aria-pressed", String(n === state.mixer)));
}

// Return the pixels of the picture as records; a pixel covers the entries from the first to the last query and key.
function listNumbers(it) {
  const layer = it.numbers && getLayer(it);
  if (!layer) return [];
  const { rows, columns, queries, keys } = layer;
  const cut = (n, bins, count) => Math.floor((n * count) / bins);
  return Array.from(it.numbers, (value, n) => {
    const [r, c] = [Math.floor(n / columns), n % columns];
    return { query: cut(r, rows, queries), last_query: cut(r + 1, rows, queries) - 1, key: cut(c, columns, keys), last_key: cut(c + 1, columns, keys) - 1, entry: Number.isFinite(value) ? value : null };
  });
}

function listenToPointer(it) {
  const find = (event) => {
    const [box, layer] = [it.canvas.getBoundingClientRect(), getLayer(it)];
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    return it.numbers && x >= 0 && x < 1 && y >= 0 && y < 1 ? { q: Math.floor(y * layer.queries), k: Math.floor(x * layer.keys) } : null;
  };
  const hover = (at) => {
    if (at?.q === it.hovered?.q && at?.k === it.hovered?.k) return;
    it.hovered = at;
    showEntry(it);
  };
  it.canvas.addEventListener("pointermove", (event) => event.pointerType !== "touch" && hover(find(event)));
  it.canvas.addEventListener("pointerleave", () => hover(null));
  it.canvas.addEventListener("click", (event) => {
    const at = find(event);
    if (at) select(it, at);
  });
}

function select(it, at) {
  it.hovered = null;
  it.app.go(at);
}

// Select the entry beside the selected one; at first, the first entry of the last row.
function stepEntry(it, down, right) {
  const [layer, { q, k }] = [getLayer(it), it.app.state()];
  if (q === undefined || k === undefined) return select(it, { q: q ?? layer.queries - 1, k: k ?? 0 });
  const move = (place, by, count) => Math.min(Math.max(place + by, 0), count - 1);
  return select(it, { q: move(q, down, layer.queries), k: move(k, right, layer.keys) });
}

// Go to the next or previous head or layer, if there is one.
function stepPlace({ app }, key, by) {
  const [state, { implicit }] = [app.state(), app.summary()];
  const next = state[key] + by;
  const count = key === "mixer" ? implicit.length : implicit[state.mixer].heads;
  if (next >= 0 && next < count) app.go({ [key]: next, ...(key === "mixer" && { channel: null }) });
}

function leaveView(it, watch) {
  watch.disconnect();
  it.asking?.abort();
  it.cell?.abort();
}

const listKeys = (it) => [
  ["ArrowLeft", "key before", () => stepEntry(it, 0, -1)],
  ["ArrowRight", "key after", () => stepEntry(it, 0, 1)],
  ["ArrowUp", "query before", () => stepEntry(it, -1, 0)],
  ["ArrowDown", "query after", () => stepEntry(it, 1, 0)],
  ["[", "previous head", () => stepPlace(it, "channel", -1)],
  ["]", "next head", () => stepPlace(it, "channel", 1)],
  [",", "previous layer", () => stepPlace(it, "mixer", -1)],
  [".", "next layer", () => stepPlace(it, "mixer", 1)],
];

const HANDS = [
  ["hover", "show an entry"],
  ["click, tap", "select an entry"],
];
