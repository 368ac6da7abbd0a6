// The Map view: all weights of one head, from the full matrix down to single weights.

import { Fault } from "../../data/page_error.js";
import { TILE, countLevels, createTileCache } from "../../data/tile_cache.js";
import { readBackground, chooseScaleName } from "../../drawing/color.js";
import { createCanvasPen, createSvgPen } from "../../drawing/canvas_pen.js";
import { formatCount } from "../../drawing/number_format.js";
import { AXES } from "../../drawing/words.js";
import { getStateHeadNumber } from "../../frame/selected_word.js";
import { createViewport } from "./viewport.js";
import { listenToPointer } from "./pointer_input.js";
import { READ, drawMap, listVisibleTiles, chooseTileLevel, measureRoom, getVisibleRange } from "./heat_map_drawing.js";
import { createReadout } from "./cell_readout.js";

const MOST_NUMBERS = 2 ** 19; // that are saved as a table
const SETTLED = 250; // milliseconds without movement before the link stores the viewport
const NAME = `Map of one head: ${AXES}. Arrow keys move by one token.`;

export const view = {
  name: "map",
  title: "Map",
  question: "What does one head attend to?",
  bar: ["attention", "batch", "layer", "head", "off", "show", "sink", "target", "how", "scale"],
  mount,
};

// `it` is the state that the functions below share: the canvas and the readout; `at`, everything that is drawn (size, camera,
// tiles, colors, the pinned cell and the cell under the pointer); the head; and the viewport in the link.
function mount(stage, app) {
  const canvas = app.el("canvas", { tabindex: 0, role: "application", "aria-label": NAME });
  const told = createReadout(app);
  stage.classList.add("map");
  stage.append(app.el("div", { class: "map-sheet" }, canvas), told.element);
  const at = { size: { width: 0, height: 0 }, pinned: {}, pointed: null, word: app.word };
  const it = { app, canvas, told, at, pen: createCanvasPen(canvas.getContext("2d")), planned: false, subject: null, written: null, timer: null, colours: "", opening: null };
  const watch = new ResizeObserver(() => resizeCanvas(it));
  watch.observe(canvas.parentElement);
  listenToPointer(canvas, at, { moved: () => handleMove(it), point: (cell) => pointAtCell(it, cell), pin: (cell) => pinCell(it, cell) });
  return { draw: (state) => drawView(it, state), leave: () => leaveView(it, watch), keys: listKeys(it), hands: HANDS, picture: () => exportPicture(at), table: () => listNumbers(it) };
}

// Draw the state of the link: the head, the pinned cell and the viewport.
function drawView(it, state) {
  const { app, at } = it;
  const setting = app.settings.get(state);
  const name = JSON.stringify([app.shownId(), app.place(), state.how, setting !== "weight" && app.settings.query(state)]);
  at.quantity = app.settings.quantity(state);
  const opened = name === it.subject ? undefined : updateHead(it, state);
  it.subject = name;
  at.pinned = { q: state.q, k: state.k };
  const where = JSON.stringify([state.x ?? null, state.y ?? null, state.zoom ?? null]);
  if (where !== it.written) placeViewport(at, state);
  it.written = where;
  showReadout(it);
  if (at.quantity.description) describePicture(it, state); // the word of the logit may be known by now
  it.colours = "";
  scheduleFrame(it);
  return opened; // the page shows its error
}

// Load another head or another pooling; the viewport stays the same.
function updateHead(it, state) {
  const { app, at } = it;
  const { rows, columns, layers } = app.attention();
  const { queries, keys } = layers[state.layer];
  const [of, place] = [app.shownId(), app.place()];
  at.tiles?.leave();
  if (at.queries !== queries || at.keys !== keys || at.of !== of) {
    Object.assign(at, { queries, keys, of, levels: countLevels(queries, keys), camera: createViewport(keys, queries, () => measureRoom(at.size)) });
    it.written = null;
  }
  const how = state.how ?? "mean";
  const shown = at.quantity.name === "weight" ? null : app.settings.query(state);
  const fetch = (query, signal) => (shown ? app.source.attribution(of, { ...place, ...shown, ...query, how }, signal) : app.source.tile(of, { ...place, ...query, how }, signal));
  Object.assign(at, { how, inUnits: app.inUnits, lists: { rows, columns }, scale: null, profiles: null, kind: null });
  at.tiles = createTileCache(fetch, at.quantity.measure, () => scheduleFrame(it), (fault) => app.fail(fault.message));
  it.colours = "";
  it.opening?.abort();
  if (!shown) return openHead(it, of, place, state);
  it.busy = true; // until the first tile arrives
  app.wait(`Running ${app.start.model}`);
  return describePicture(it, state);
}

// Load the profiles of the head and its kind, and show the progress on a long text.
async function openHead(it, of, place, state) {
  const { app, at } = it;
  it.busy = false;
  it.opening?.abort();
  const control = (it.opening = new AbortController());
  const said = `Computing all weights of layer ${state.layer}, head ${getStateHeadNumber(app, state)}`;
  describePicture(it, state);
  app.wait(said);
  for await (const line of app.source.open(of, place, control.signal)) {
    if (control !== it.opening) return;
    if (line.levels === undefined) app.wait(said, line.done);
    else Object.assign(at, { profiles: line, kind: line.kind });
  }
  app.ready();
  describePicture(it, state);
  scheduleFrame(it);
}

function describePicture({ app, at }, state) {
  const kind = at.kind ? ` · ${at.kind}` : "";
  app.caption(app.el("b", {}, `Layer ${state.layer}, head ${getStateHeadNumber(app, state)}${kind}`), at.quantity.description ? ` · ${at.quantity.description}` : "", ` · ${AXES}; a gray cell is hidden from its row`);
}

// Draw once, with the next frame of the screen.
function scheduleFrame(it) {
  if (!it.planned) requestAnimationFrame(() => drawFrame(it));
  it.planned = true;
}

function drawFrame(it) {
  const { app, at, canvas } = it;
  it.planned = false;
  if (!at.camera) return;
  chooseLevel(it);
  if (it.busy && !at.tiles.waiting()) {
    it.busy = false;
    app.ready();
  }
  canvas.parentElement.toggleAttribute("data-busy", Boolean(it.busy));
  const context = canvas.getContext("2d");
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.clearRect(0, 0, at.size.width, at.size.height);
  drawMap(it.pen, at);
}

// Choose the level of detail, and request its tiles, colors and words.
function chooseLevel(it) {
  const { app, at } = it;
  const z = chooseTileLevel(at);
  const sight = listVisibleTiles(at, z);
  at.tiles.want([[at.levels - 1, 0, 0], ...sight]);
  const state = app.state();
  const top = Math.max(...sight.map((place) => at.tiles.at(...place)?.top ?? 0), at.quantity.least);
  if (!at.scale || (at.quantity.name !== "weight" && top > 0) || chooseScaleName(state, at.keys) === "linear" || !at.tiles.waiting()) at.scale = at.quantity.makePictureScale(state, at.keys, top);
  requestTiles(it, z);
  requestWords(it);
}

// Update the color table and the legend if the scale changed.
function requestTiles(it, z) {
  const { app, at } = it;
  const name = `${at.scale.name} ${at.scale.low} ${at.scale.high} ${app.colour.isDark()} ${z}`;
  if (name === it.colours) return;
  it.colours = name;
  at.paint = at.quantity.paint(at.scale);
  app.legend(at.quantity.makeLegend(at.scale, z > 0 && `${at.how} of ${2 ** z} × ${2 ** z}`));
}

// Request the visible words that are not loaded.
function requestWords(it) {
  const { app, at } = it;
  const ask = (list, from, to) => {
    if (app.word(list, from) === undefined || app.word(list, to - 1) === undefined) app.words(list, from, to).then(() => scheduleFrame(it), () => {});
  };
  for (const { q, k } of [at.pinned, at.pointed ?? {}]) {
    if (q !== undefined) ask(at.lists.rows, q, q + 1);
    if (k !== undefined) ask(at.lists.columns, k, k + 1);
  }
  if (at.camera.pixels() < READ) return;
  const box = getVisibleRange(at);
  const clampRange = (from, to, most) => [Math.max(0, Math.floor(from)), Math.min(most, Math.ceil(to))];
  ask(at.lists.rows, ...clampRange(at.camera.query(box.y), at.camera.query(box.y + box.height), at.queries));
  ask(at.lists.columns, ...clampRange(at.camera.key(box.x), at.camera.key(box.x + box.width), at.keys));
}

// Redraw, and store the viewport in the link once the camera stops.
function handleMove(it) {
  scheduleFrame(it);
  clearTimeout(it.timer);
  it.timer = setTimeout(() => {
    const { x, y, zoom } = it.at.camera.here;
    const where = zoom > 1.001 ? { x: roundNumber(x), y: roundNumber(y), zoom: roundNumber(zoom) } : { x: null, y: null, zoom: null };
    it.written = JSON.stringify([where.x, where.y, where.zoom]);
    it.app.go(where, { replace: true, dismiss: false });
  }, SETTLED);
}

function placeViewport(at, { x, y, zoom }) {
  if (zoom === undefined) at.camera.all();
  else Object.assign(at.camera.here, { x: x ?? at.keys / 2, y: y ?? at.queries / 2, zoom });
  if (at.size.width) at.camera.settle();
}

function pointAtCell(it, cell) {
  const { at } = it;
  if (cell?.q === at.pointed?.q && cell?.k === at.pointed?.k) return;
  at.pointed = cell;
  showReadout(it);
  scheduleFrame(it);
}

// Show the cell under the pointer, or else the pinned cell, in the readout.
function showReadout({ at, told }) {
  const cell = at.pointed ?? (at.pinned.k === undefined ? null : at.pinned);
  told.show(cell?.q === undefined ? null : cell, at.pinned, getTileCode(at, cell));
}

// Return the value of the pixel over a cell if the pixel covers more than one weight.
function getTileCode(at, cell) {
  const z = at.camera ? chooseTileLevel(at) : 0;
  if (!cell || cell.q === undefined || z === 0) return null;
  const [r, c] = [cell.q >> z, cell.k >> z];
  const tile = at.tiles.at(z, Math.floor(r / TILE), Math.floor(c / TILE));
  const found = tile && tile.codes[(r % TILE) * tile.shape[1] + (c % TILE)];
  const value = found === undefined ? null : at.quantity.decode(found);
  return value === null ? null : { side: 2 ** z, how: at.how, text: at.quantity.write(value) };
}

function pinCell({ app, at }, cell, show = false) {
  if (show) at.camera.show(cell.k, cell.q);
  app.go({ q: cell.q ?? null, k: cell.k ?? null }, { replace: show });
}

// Move the pinned cell; the first press pins the cell in the middle of the screen.
function stepCell(it, dq, dk) {
  const { at } = it;
  const { q, k } = at.pinned;
  const { x, y, width, height } = getVisibleRange(at);
  const middle = { q: Math.floor(at.camera.query(y + height / 2)), k: Math.floor(at.camera.key(x + width / 2)) };
  const from = { q: q ?? middle.q, k: k ?? Math.min(q ?? middle.k, at.keys - 1) };
  const still = q === undefined && k === undefined;
  const step = (value, by, most) => Math.min(Math.max(value + (still ? 0 : by), 0), most - 1);
  pinCell(it, { q: step(from.q, dq, at.queries), k: step(from.k, dk, at.keys) }, true);
  if (at.camera.here.zoom > 1) handleMove(it);
}

// Zoom around the pinned cell, or around the middle of the screen.
function zoomBy(it, factor) {
  const { at } = it;
  const { q, k } = at.pinned;
  const box = getVisibleRange(at);
  const x = k === undefined ? box.x + box.width / 2 : at.camera.across(k + 0.5);
  const y = q === undefined ? box.y + box.height / 2 : at.camera.down(q + 0.5);
  at.camera.zoom(factor, x, y);
  handleMove(it);
}

function resizeCanvas(it) {
  const { at, canvas } = it;
  const { clientWidth: width, clientHeight: height } = canvas.parentElement;
  at.size = { width, height };
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  at.camera?.settle();
  drawFrame(it);
}

function leaveView(it, watch) {
  watch.disconnect();
  clearTimeout(it.timer);
  it.opening?.abort();
  it.at.tiles?.leave();
  it.told.leave();
}

function exportPicture(at) {
  const sheet = createSvgPen(at.size.width, at.size.height, readBackground("--paper"));
  drawMap(sheet, { ...at, pointed: null });
  return { svg: sheet.done() };
}

const listKeys = (it) => [
  ["ArrowUp", "previous query", () => stepCell(it, -1, 0)],
  ["ArrowDown", "next query", () => stepCell(it, 1, 0)],
  ["ArrowLeft", "previous key", () => stepCell(it, 0, -1)],
  ["ArrowRight", "next key", () => stepCell(it, 0, 1)],
  ["+", "zoom in", () => zoomBy(it, 2)],
  ["=", "zoom in", () => zoomBy(it, 2)],
  ["-", "zoom out", () => zoomBy(it, 0.5)],
  ["0", "show the whole map", () => (it.at.camera.all(), handleMove(it))],
];

const HANDS = [
  ["wheel, pinch", "zoom at the pointer"],
  ["double click", "zoom in; with Shift, zoom out"],
  ["drag", "move the map"],
  ["click, tap", "pin a weight; on a token at the side, pin its row or column"],
];

// Return the numbers on screen as records, without what is hidden; a pixel of many weights stands at its first query and key.
async function listNumbers({ app, at }) {
  if (!at.camera) return [];
  const tiles = listVisibleTiles(at, chooseTileLevel(at)).map((place) => [...place, at.tiles.at(...place)]).filter(([, , , tile]) => tile);
  const count = tiles.reduce((sum, [, , , tile]) => sum + tile.codes.filter((code) => at.quantity.decode(code) !== null).length, 0);
  if (count > MOST_NUMBERS) throw new Fault(`${formatCount(count)} numbers are on screen: zoom in until there are at most ${formatCount(MOST_NUMBERS)}.`);
  const isWeight = at.quantity.name === "weight";
  const found = [];
  for (const [level, row, column, tile] of tiles) {
    const [side, width] = [2 ** level, tile.shape[1]];
    const numbers = isWeight ? await app.source.exact(at.of, "tile", { ...app.place(), level, row, column, how: at.how }) : tile.codes;
    numbers.forEach((value, n) => {
      if (!Number.isNaN(value)) found.push({ query: (row * TILE + Math.floor(n / width)) * side, key: (column * TILE + (n % width)) * side, [at.quantity.name]: value });
    });
  }
  return found;
}

const roundNumber = (value) => Number(value.toPrecision(7));
