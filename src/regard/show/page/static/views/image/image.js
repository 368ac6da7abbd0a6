// The Image view: what a patch of an image, a class token or a word looks at in the image.

import { formatColor, chooseInk } from "../../drawing/color.js";
import { isTouch } from "../../drawing/elements.js";
import { listStrongestLinks } from "../../drawing/strongest_links.js";
import { quoteWord, renderWord } from "../../drawing/words.js";
import { renderHeadChoice } from "../text/text_controls.js";
import { renderChoice } from "../../frame/controls.js";
import { findImage, findImageRow } from "../../frame/image_rows.js";
import { drawPatches, loadImage } from "./image_canvas.js";
import { explainNoPull, fetchNumbers, getKind, getQuantity, hasHeads, listKinds, makeQuery, nameLayer, readExactNumbers } from "./image_numbers.js";
import { createPatchGrid, namePatch, stepPatch, NONE } from "./patch_grid.js";

const KINDS = "The weights of a layer, what reaches it through all layers before, or how the weights moved a number";
const MAX_WORDS = 400; // tokens that are no patches, listed beside the image
const UNPLACED = "The tokens of this layer are not known as patches of an image. Choose another layer or attention, or set recording.places.";
const MISSING = "was not given to this page. Pass image=[...] with all images that the model read, in their order.";
const NO_WEIGHTS = "it has no weights: it sees nothing, or they are not numbers (NaN)";
const CONTROLS = ["attention", "layer", "row", "image"];

export const view = {
  name: "image",
  title: "Image",
  question: "What does a patch or a token look at?",
  bar: (state, app) => (app && getKind(app, state) === "pull" ? CONTROLS : [...CONTROLS, "scale"]), // signed numbers have a linear scale
  mount,
};

const MEANT = { "class token": "which stands for the whole image" };

// Return whether a recording has an image, so that this view can be shown.
export const hasImage = (summary) => Boolean(summary?.images?.length);

// `it` is the state that the functions below share: the parts of the page; the grid of the layer; the query under the pointer;
// the last request; the answer shown, its codes and their query; that of the selected query; and the key under the pointer.
function mount(stage, app) {
  stage.classList.add("image");
  const controls = app.el("div", { class: "image-controls" });
  const canvas = app.el("canvas", { tabindex: 0, role: "application", "aria-label": "Image. Arrow keys move by one patch." });
  const sheet = app.el("div", { class: "image-sheet" }, canvas);
  const words = app.el("div", { class: "image-words", role: "group", "aria-label": "Tokens that are no patches" });
  const links = app.el("div", { class: "image-links", role: "status", "aria-label": "Strongest links" });
  const lacking = app.el("div"); // what is not shown, and why
  stage.append(controls, sheet, app.el("aside", { class: "image-side" }, words, links, lacking));
  const it = { app, stage, controls, canvas, sheet, words, links, lacking, grid: null, loaded: null, hovered: null, name: "", of: "", shown: null, selected: null, pointed: null, asking: null };
  const watch = new ResizeObserver(() => paint(it));
  watch.observe(sheet);
  listenToPointer(it);
  return { draw: (state) => drawView(it, state), leave: () => leaveView(it, watch), keys: listKeys(it), hands: HANDS, picture: () => ({ canvas }), table: () => listNumbers(it) };
}

const getLayer = (it, state) => it.app.attention().layers[state.layer];
const getImage = (state, layer) => Math.min(Math.max(state.image ?? 0, 0), Math.max((layer.grids?.length ?? 1) - 1, 0));

async function drawView(it, state) {
  const { app } = it;
  const summary = app.summary();
  const layer = getLayer(it, state);
  const number = getImage(state, layer);
  const found = summary.grids?.[layer.grids?.[number]];
  it.stage.classList.toggle("unplaced", !found);
  if (!found) return showUnplaced(it);
  app.fail("");
  const kinds = listKinds(app, state);
  const choice = kinds.length > 1 ? [renderChoice(app, "of", getKind(app, state), kinds.map((kind) => [kind, kind]), KINDS)] : [];
  renderHeadChoice(it.controls, app, state, choice, hasHeads(app, state));
  const reason = explainNoPull(app, state);
  it.lacking.replaceChildren(...(reason ? [app.el("p", { class: "image-note note" }, reason)] : []));
  const first = findImageRow(summary, layer, state);
  const place = findImage(summary, layer, first, number);
  if (place >= summary.images.length) return showUnplaced(it, `Image ${place} ${MISSING}`);
  const of = JSON.stringify([summary.id, app.attention().kind, app.attention().part, state.layer, number, first]);
  if (of !== it.of) {
    const before = it.grid && it.shown && { grid: it.grid, patch: it.grid.patchOf(it.shown.q, it.shown.window) };
    it.of = of;
    it.hovered = it.shown = it.selected = it.pointed = it.name = null;
    it.grid = createPatchGrid(found, layer, state.kind === "cross", layer.grids.map((one) => summary.grids[one]));
    it.loaded = await loadOnce(it, summary.images[place]);
    if (of !== it.of) return null;
    renderWords(it);
    const moved = state.q !== undefined && before && moveQuery(it, before);
    if (moved) return pin(it, moved, { replace: true });
  }
  return showQuery(it, state);
}

// Return the query at the place of a patch of another grid; null if the numbers of its query stay valid.
function moveQuery({ grid }, { grid: former, patch }) {
  const same = former.rows === grid.rows && former.columns === grid.columns && former.windows === 1 && grid.windows === 1;
  if (patch === NONE || same) return null;
  const scale = (place, from, to) => Math.floor(((place + 0.5) * to) / from);
  const [row, column] = [scale(Math.floor(patch / former.columns), former.rows, grid.rows), scale(patch % former.columns, former.columns, grid.columns)];
  return grid.findQuery(row * grid.columns + column);
}

// Return the first batch row of the map of the image that a state names: one row for each window.
const getFirstRow = (it, state) => findImageRow(it.app.summary(), getLayer(it, state), state) * it.grid.windows;

// Load the image of an address once.
async function loadOnce(it, address) {
  it.images ??= new Map();
  if (!it.images.has(address)) it.images.set(address, await loadImage(address));
  return it.images.get(address);
}

function showUnplaced(it, text = UNPLACED) {
  it.of = "";
  it.grid = null;
  it.app.legend(null);
  it.app.caption();
  it.words.replaceChildren();
  it.links.replaceChildren();
  it.app.fail(text);
}

// Return the query that is shown: the one under the pointer, the selected one, or the first.
function getSubject(it, state) {
  if (it.hovered) return it.hovered;
  if (state.q === undefined) return it.grid.chooseQuery();
  return { q: state.q, window: (state.b ?? 0) % it.grid.windows };
}

// Fetch the weights of the subject; only the answer to the last request is shown.
async function showQuery(it, state) {
  const { app } = it;
  const { q, window } = getSubject(it, state);
  const base = getFirstRow(it, state);
  const query = makeQuery(app, state, base + window, q);
  const kind = getKind(app, state);
  const name = JSON.stringify([app.summary().id, kind, query]);
  if (name === it.name) return paint(it);
  it.name = name;
  it.asking?.abort();
  const control = (it.asking = new AbortController());
  app.wait("Loading the weights of this token");
  try {
    const { codes, largest } = await fetchNumbers(app, kind, query, control.signal);
    if (control !== it.asking) return;
    app.ready();
    it.shown = { codes, largest, q, window, kind, query };
    if (!it.hovered) it.selected = it.shown;
    paint(it);
    listLinks(it);
  } catch (fault) {
    if (fault.name === "AbortError") return;
    it.name = "";
    app.ready();
    app.fail(fault.message);
  }
}

// Color the patches and the words.
function paint(it) {
  const { app, grid, shown, loaded } = it;
  if (!grid || !shown || !loaded || it.shown.codes.length !== grid.patches[0].length) return;
  const state = app.state();
  const quantity = getQuantity(app, state);
  const scale = quantity.makeScale(state, shown.codes.length, quantity.measure(shown.codes));
  const look = (key) => {
    const value = quantity.decode(shown.codes[key]);
    return value === null ? null : quantity.shade(scale, value);
  };
  const patch = grid.patchOf(shown.q, shown.window);
  const size = fitImage(it);
  it.canvas.style.width = `${size[0]}px`;
  it.canvas.style.height = `${size[1]}px`;
  drawPatches(it.canvas, loaded, grid, { window: shown.window, patch, selected: it.hovered && it.selected ? grid.patchOf(it.selected.q, it.selected.window) : NONE }, (key) => {
    const colour = look(key);
    return colour && formatColor(colour);
  }, size);
  for (const chip of it.words.querySelectorAll("[data-query]")) dressWord(it, chip, look);
  app.legend(quantity.makeLegend(scale));
  describeQuery(it, patch);
}

// Return the width and the height at which the image fits into its sheet.
function fitImage({ sheet, loaded }) {
  const { width, height } = loaded.canvas;
  const room = sheet.getBoundingClientRect();
  const factor = Math.max(Math.min(room.width / width, room.height / height), 0);
  return [Math.max(width * factor, 1), Math.max(height * factor, 1)];
}

function dressWord({ grid, shown }, chip, look) {
  const q = Number(chip.dataset.query);
  const colour = grid.isCross ? null : look(grid.keyOf(q));
  chip.style.background = colour ? formatColor(colour) : "";
  chip.style.color = colour ? chooseInk(colour) : "";
  chip.classList.toggle("selected", q === shown.q && grid.patchOf(q, shown.window) === NONE);
}

// Return the numbers of the patches and the words as records.
async function listNumbers({ app, grid, shown }) {
  if (!grid || !shown) return [];
  const { columns } = app.attention();
  if (columns) await app.words(columns, 0, shown.codes.length);
  const numbers = await readExactNumbers(app, shown);
  return Array.from(numbers, (number, key) => {
    const patch = grid.patches[shown.window][key];
    return { query: shown.q, key, word: grid.nameKey(key, shown.window) ?? app.word(columns, key) ?? `token ${key}`, patch: patch === NONE ? null : patch, [getQuantity(app, app.state()).name]: Number.isNaN(number) ? null : number };
  });
}

function describeQuery(it, patch) {
  const { app, grid, shown } = it;
  const state = app.state();
  const quantity = getQuantity(app, state);
  let inside = 0;
  shown.codes.forEach((code, key) => (inside += grid.patches[shown.window][key] === NONE ? 0 : quantity.decode(code) ?? 0));
  const said = nameQuery(it, shown);
  const meant = patch === NONE ? MEANT[said] : "row, column";
  const [before, after] = { weights: ["the attention of ", ""], rollout: ["its share in ", ""], pull: ["how the attention of ", ` to it moves ${quantity.of}`] }[shown.kind];
  const sum = shown.kind === "pull" ? `all patches together ${quantity.write(inside)}` : `all patches get ${quantity.write(inside)}`;
  const nothing = shown.kind === "pull" && !shown.codes.every(Number.isNaN) ? `${quantity.of} does not depend on it` : NO_WEIGHTS;
  const line = [app.el("b", {}, nameLayer(app, state)), ` · each patch is colored by ${before}`, app.el("b", {}, said), meant ? ` (${meant})` : "", after];
  app.caption(...line, `; ${shown.codes.some(Boolean) ? sum : nothing}`, describePointed(it, quantity));
}

const nameQuery = (it, { q, window }) => (it.grid.patchOf(q, window) === NONE ? nameToken(it, q) : namePatch(it.grid.patchOf(q, window), it.grid.columns));

// Return what the selected query gives the key under the pointer.
function describePointed(it, quantity) {
  const { selected, shown, pointed } = it;
  if (pointed === null || !selected || selected.kind !== shown.kind || selected.window !== pointed.window) return "";
  const value = quantity.decode(selected.codes[pointed.key]);
  const sign = quantity.isSigned && value ? ` (${value > 0 ? "raises" : "lowers"} it)` : "";
  return `; from ${nameQuery(it, selected)} to ${pointed.name}: ${value === null ? "not seen" : quantity.write(value) + sign}`;
}

// Return the name of a query that is no patch: its own, or its word.
function nameToken({ app, grid }, q) {
  const known = grid.isCross ? null : grid.nameKey(grid.keyOf(q));
  if (known) return known;
  const word = app.word(app.attention().rows, q);
  return word === undefined ? `token ${q}` : quoteWord(word);
}

// List the tokens that are no patches as buttons: words of a text, a class token, registers.
async function renderWords(it) {
  const { app, grid, of } = it;
  const some = grid.others();
  const { rows, layers } = app.attention();
  if (rows && some.length) await app.words(rows, 0, layers[app.state().layer].queries);
  if (of !== it.of) return;
  const chips = some.slice(0, MAX_WORDS).map((q) => {
    const known = grid.isCross ? null : grid.nameKey(grid.keyOf(q));
    const word = app.word(rows, q);
    const text = known ?? (word === undefined ? `token ${q}` : null);
    const hover = () => hoverQuery(it, { q, window: 0 }, grid.isCross ? null : { key: grid.keyOf(q), window: 0, name: nameToken(it, q) });
    return app.el("button", { class: "word", "data-query": q, onpointerenter: isTouch() ? null : hover, onpointerleave: () => hoverQuery(it, null), onfocus: hover, onblur: () => hoverQuery(it, null), onclick: () => pin(it, { q, window: 0 }) }, text ?? renderWord(word));
  });
  it.words.replaceChildren(...(chips.length ? [app.el("h2", {}, some.length < grid.others().length ? "Tokens" : app.state().kind === "cross" ? "Words" : "Other tokens"), app.el("p", {}, chips)] : []));
  it.words.hidden = !chips.length;
  paint(it);
}

function listLinks(it) {
  const { app, grid, shown, links } = it;
  const quantity = getQuantity(app, app.state());
  const found = shown.largest.map((one) => ({ ...one, word: nameKey(it, one.place) }));
  const go = ({ place }) => {
    const patch = grid.patches[shown.window][place];
    const next = patch === NONE ? { q: place - grid.keyOf(0), window: 0 } : grid.findQuery(patch);
    if (next && !grid.isCross && next.q >= 0) pin(it, next);
  };
  links.replaceChildren(app.el("h2", {}, shown.kind === "pull" ? "Largest pulls" : "Looks most at"), listStrongestLinks(found, go, quantity));
}

// Return the name of a key, without spaces that would be marked as those of a text, or its word.
const nameKey = (it, key) => it.grid.nameKey(key, it.shown.window)?.replaceAll(" ", "\u00a0") ?? it.app.word(it.app.attention().columns, key) ?? `token ${key}`;

// Show the query under the pointer, and what the selected one gives the key there.
function hoverQuery(it, query, pointed = null) {
  it.hovered = query;
  it.pointed = pointed;
  if (it.grid) showQuery(it, it.app.state());
}

function pin(it, { q, window }, options) {
  const state = it.app.state();
  it.hovered = null;
  it.app.go({ q, k: null, b: getFirstRow(it, state) + window }, options);
}

function listenToPointer(it) {
  const findPatch = (event) => {
    const box = it.canvas.getBoundingClientRect();
    const [column, row] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    return !it.grid || column < 0 || column >= 1 || row < 0 || row >= 1 ? null : it.grid.findPatch(column, row);
  };
  const findQuery = (patch) => (patch === null ? null : it.grid.findQuery(patch));
  it.canvas.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return;
    const patch = findPatch(event);
    const place = patch === null ? undefined : it.grid.findKey(patch);
    hoverQuery(it, findQuery(patch), place ? { ...place, name: namePatch(patch, it.grid.columns) } : null);
  });
  it.canvas.addEventListener("pointerleave", () => hoverQuery(it, null));
  it.canvas.addEventListener("click", (event) => {
    const found = findQuery(findPatch(event));
    if (found) pin(it, found);
  });
}

// Select the patch beside the selected one; from a token that is no patch, the first patch.
function stepQuery(it, down, right) {
  if (!it.grid) return;
  it.hovered = null;
  const { q, window } = getSubject(it, it.app.state());
  const patch = it.grid.patchOf(q, window);
  const next = it.grid.findQuery(patch === NONE ? 0 : stepPatch(it.grid, patch, down, right));
  if (next) pin(it, next);
  else stepToken(it, (n) => n + down + right);
}

// Select the token next(current token) among those that are no patches.
function stepToken(it, next) {
  if (!it.grid) return;
  const some = it.grid.others();
  const at = some.indexOf(getSubject(it, it.app.state()).q);
  if (some.length) pin(it, { q: some[Math.min(Math.max(next(at < 0 ? 0 : at), 0), some.length - 1)], window: 0 });
}

function leaveView(it, watch) {
  watch.disconnect();
  it.asking?.abort();
}

const listKeys = (it) => [
  ["ArrowLeft", "patch to the left", () => stepQuery(it, 0, -1)],
  ["ArrowRight", "patch to the right", () => stepQuery(it, 0, 1)],
  ["ArrowUp", "patch above", () => stepQuery(it, -1, 0)],
  ["ArrowDown", "patch below", () => stepQuery(it, 1, 0)],
  ["Home", "first token that is no patch", () => stepToken(it, () => 0)],
  ["End", "last token that is no patch", () => stepToken(it, () => Infinity)],
];

const HANDS = [
  ["hover", "show what a patch or a token looks at"],
  ["click, tap", "select a patch or a token"],
];
