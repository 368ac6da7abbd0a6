// The Image view: what a patch of an image, a class token or a word looks at in the image.

import { roundCode } from "../../data/weight_codes.js";
import { formatColor, chooseInk } from "../../drawing/color.js";
import { isTouch } from "../../drawing/elements.js";
import { findLargest, listStrongestLinks } from "../../drawing/strongest_links.js";
import { quoteWord, renderWord } from "../../drawing/words.js";
import { renderHeadChoice } from "../text/text_controls.js";
import { renderChoice } from "../../frame/controls.js";
import { findImage, findImageRow } from "../../frame/image_rows.js";
import { getSelectedHeads, nameSelectedHeads } from "../../frame/selected_word.js";
import { drawPatches, loadImage } from "./image_canvas.js";
import { createPatchGrid, namePatch, stepPatch, NONE } from "./patch_grid.js";

const LINKS = 6; // strongest links listed
const KINDS = [["weights", "weights"], ["rollout", "rollout"]];
const MAX_WORDS = 400; // tokens that are no patches, listed beside the image
const UNPLACED = "The tokens of this layer are not known as patches of an image. Choose another layer or attention, or set recording.places.";
const MISSING = "was not given to this page. Pass image=[...] with all images that the model read, in their order.";
const NO_WEIGHTS = "it has no weights: it sees nothing, or they are not numbers (NaN)";

export const view = {
  name: "image",
  title: "Image",
  question: "What does a patch or a word look at?",
  bar: ["attention", "layer", "row", "image", "scale"],
  mount,
};

const MEANT = { "class token": "which stands for the whole image" };

// Return whether a recording has an image, so that this view can be shown.
export const hasImage = (summary) => Boolean(summary?.images?.length);

// `it` is the state that the functions below share: the parts of the page; the grid of the layer; the query under the pointer;
// the last request; and the answer shown: its codes and their query.
function mount(stage, app) {
  stage.classList.add("image");
  const controls = app.el("div", { class: "image-controls" });
  const canvas = app.el("canvas", { tabindex: 0, role: "application", "aria-label": "Image. Arrow keys move by one patch." });
  const sheet = app.el("div", { class: "image-sheet" }, canvas);
  const words = app.el("div", { class: "image-words", role: "group", "aria-label": "Tokens that are no patches" });
  const links = app.el("div", { class: "image-links", role: "status", "aria-label": "Strongest links" });
  stage.append(controls, sheet, app.el("aside", { class: "image-side" }, words, links));
  const it = { app, stage, controls, canvas, sheet, words, links, grid: null, loaded: null, hovered: null, name: "", of: "", shown: null, asking: null };
  const watch = new ResizeObserver(() => paint(it));
  watch.observe(sheet);
  listenToPointer(it);
  return { draw: (state) => drawView(it, state), leave: () => leaveView(it, watch), keys: listKeys(it), hands: HANDS, picture: () => ({ canvas }), table: () => listNumbers(it) };
}

const canRollOut = ({ app }, state) => Boolean(app.source.hasRollout?.(app.summary().id, { ...app.place(), b: state.b ?? 0 }));
const getKind = (it, state) => (state.of === "rollout" && canRollOut(it, state) ? "rollout" : "weights");
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
  const others = canRollOut(it, state) ? [renderChoice(app, "of", getKind(it, state), KINDS, "The weights of a layer, or what reaches it through all layers before")] : [];
  renderHeadChoice(it.controls, app, state, others, getKind(it, state) === "weights");
  const first = findImageRow(summary, layer, state);
  const place = findImage(summary, layer, first, number);
  if (place >= summary.images.length) return showUnplaced(it, `Image ${place} ${MISSING}`);
  const of = JSON.stringify([summary.id, app.attention().kind, app.attention().part, state.layer, number, first]);
  if (of !== it.of) {
    const before = it.grid && it.shown && { grid: it.grid, patch: it.grid.patchOf(it.shown.q, it.shown.window) };
    it.of = of;
    it.hovered = it.shown = it.name = null;
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
  const heads = getSelectedHeads(app, state);
  const many = heads.length > 1 || heads[0] !== state.head ? heads.join(",") : null;
  const query = { ...app.place(), b: base + window, q, heads: many };
  const kind = getKind(it, state);
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
    paint(it);
    listLinks(it);
  } catch (fault) {
    if (fault.name === "AbortError") return;
    it.name = "";
    app.ready();
    app.fail(fault.message);
  }
}

// Fetch the codes of a row, and its largest numbers: exact weights, or those of a rollout with the digits of their codes.
async function fetchNumbers({ source, summary }, kind, query, signal) {
  const { id } = summary();
  if (kind === "rollout") {
    const codes = await source.rollout(id, query, signal);
    return { codes, largest: await findLargest(Array.from(codes, roundCode), LINKS, () => "") };
  }
  const [codes, top] = await Promise.all([source.row(id, query, signal), source.top(id, { ...query, n: LINKS }, signal)]);
  return { codes, largest: top.found };
}

// Color the patches and the words.
function paint(it) {
  const { app, grid, shown, loaded } = it;
  if (!grid || !shown || !loaded || it.shown.codes.length !== grid.patches[0].length) return;
  const state = app.state();
  const quantity = app.settings.quantity({ ...state, show: "weight" });
  const scale = quantity.makeScale(state, shown.codes.length, quantity.measure(shown.codes));
  const look = (key) => {
    const value = quantity.decode(shown.codes[key]);
    return value === null ? null : quantity.shade(scale, value);
  };
  const patch = grid.patchOf(shown.q, shown.window);
  const size = fitImage(it);
  it.canvas.style.width = `${size[0]}px`;
  it.canvas.style.height = `${size[1]}px`;
  drawPatches(it.canvas, loaded, grid, { window: shown.window, patch, hovered: NONE }, (key) => {
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
  const numbers = shown.kind === "rollout" ? Array.from(shown.codes, roundCode) : await app.source.exact(app.summary().id, "row", shown.query);
  return Array.from(numbers, (number, key) => {
    const patch = grid.patches[shown.window][key];
    return { query: shown.q, key, word: grid.nameKey(key, shown.window) ?? app.word(columns, key) ?? `token ${key}`, patch: patch === NONE ? null : patch, weight: Number.isNaN(number) ? null : number };
  });
}

function describeQuery(it, patch) {
  const { app, grid, shown } = it;
  const state = app.state();
  const quantity = app.settings.quantity({ ...state, show: "weight" });
  let inside = 0;
  shown.codes.forEach((code, key) => (inside += grid.patches[shown.window][key] === NONE ? 0 : quantity.decode(code) ?? 0));
  const said = patch === NONE ? nameToken(it, shown.q) : namePatch(patch, grid.columns);
  const meant = patch === NONE ? MEANT[said] : "row, column";
  const [which, what] = getKind(it, state) === "rollout" ? [`Rollout up to layer ${state.layer}`, "its share in "] : [`Layer ${state.layer}, ${nameSelectedHeads(app, state)}`, "the attention of "];
  const all = shown.codes.some(Boolean) ? `all patches get ${quantity.write(inside)}` : NO_WEIGHTS;
  app.caption(app.el("b", {}, which), ` · each patch is colored by ${what}`, app.el("b", {}, said), meant ? ` (${meant})` : "", `; ${all}`);
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
    const hover = () => hoverQuery(it, { q, window: 0 });
    return app.el("button", { class: "word", "data-query": q, onpointerenter: isTouch() ? null : hover, onpointerleave: () => hoverQuery(it, null), onfocus: hover, onblur: () => hoverQuery(it, null), onclick: () => pin(it, { q, window: 0 }) }, text ?? renderWord(word));
  });
  it.words.replaceChildren(...(chips.length ? [app.el("h2", {}, some.length < grid.others().length ? "Tokens" : app.state().kind === "cross" ? "Words" : "Other tokens"), app.el("p", {}, chips)] : []));
  it.words.hidden = !chips.length;
  paint(it);
}

function listLinks(it) {
  const { app, grid, shown, links } = it;
  const quantity = app.settings.quantity({ ...app.state(), show: "weight" });
  const found = shown.largest.map((one) => ({ ...one, word: nameKey(it, one.place) }));
  const go = ({ place }) => {
    const patch = grid.patches[shown.window][place];
    const next = patch === NONE ? { q: place - grid.keyOf(0), window: 0 } : grid.findQuery(patch);
    if (next && !grid.isCross && next.q >= 0) pin(it, next);
  };
  links.replaceChildren(app.el("h2", {}, "Looks most at"), listStrongestLinks(found, go, quantity));
}

// Return the name of a key, without spaces that would be marked as those of a text, or its word.
const nameKey = (it, key) => it.grid.nameKey(key, it.shown.window)?.replaceAll(" ", "\u00a0") ?? it.app.word(it.app.attention().columns, key) ?? `token ${key}`;

function hoverQuery(it, query) {
  it.hovered = query;
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
    if (!it.grid || column < 0 || column >= 1 || row < 0 || row >= 1) return null;
    return it.grid.findQuery(Math.floor(row * it.grid.rows) * it.grid.columns + Math.floor(column * it.grid.columns));
  };
  it.canvas.addEventListener("pointermove", (event) => event.pointerType !== "touch" && hoverQuery(it, findPatch(event)));
  it.canvas.addEventListener("pointerleave", () => hoverQuery(it, null));
  it.canvas.addEventListener("click", (event) => {
    const found = findPatch(event);
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
  ["hover", "show what a patch or a word looks at"],
  ["click, tap", "select a patch or a word"],
];
