// Draw a map: the tiles, words or numbers along both axes, profiles at two sides, and marks of selected cells.

import { TILE, colorTile } from "../../data/tile_cache.js";
import { formatColor, readBackground, chooseInk, shadeWeight } from "../../drawing/color.js";
import { formatCount, formatThreeDigits, roundStep } from "../../drawing/number_format.js";
import { formatPlainWord } from "../../drawing/words.js";

export const READ = 13; // minimum pixels per token for words
const WRITTEN = 40; // minimum pixels per token for numbers
const ROUNDING = 1e-5; // nats, above the rounding of an entropy of 0 in float32

// Return the rectangle for the plane, between its words and its profiles, on a sheet of a size.
export function measureRoom({ width, height }) {
  const narrow = width < 560;
  const [left, top, right, bottom] = narrow ? [74, 66, 30, 46] : [118, 92, 56, 52];
  return { x: left, y: top, width: Math.max(40, width - left - right), height: Math.max(40, height - top - bottom) };
}

// Return the visible part of the plane as {x, y, width, height} in pixels.
export function getVisibleRange(at) {
  const { camera, keys, queries } = at;
  const area = measureRoom(at.size);
  const [x, y] = [Math.max(area.x, camera.across(0)), Math.max(area.y, camera.down(0))];
  const [right, bottom] = [Math.min(area.x + area.width, camera.across(keys)), Math.min(area.y + area.height, camera.down(queries))];
  return { x, y, width: right - x, height: bottom - y };
}

// Return the finest level whose pixels are no smaller than those of the screen.
export function chooseTileLevel(at) {
  return Math.min(Math.max(0, Math.ceil(-Math.log2(at.camera.pixels() * devicePixelRatio))), at.levels - 1);
}

// List the visible tiles of a level, those in the middle first.
export function listVisibleTiles(at, z) {
  const { camera } = at;
  const box = getVisibleRange(at);
  const span = TILE * 2 ** z;
  const countSpans = (tokens) => Math.ceil(tokens / span) - 1;
  const range = (from, to, most) => [Math.max(0, Math.floor(from / span)), Math.min(most, Math.floor(to / span))];
  const [c0, c1] = range(camera.key(box.x), camera.key(box.x + box.width), countSpans(at.keys));
  const [r0, r1] = range(camera.query(box.y), camera.query(box.y + box.height), countSpans(at.queries));
  const found = [];
  for (let row = r0; row <= r1; row++) for (let column = c0; column <= c1; column++) found.push([z, row, column]);
  const far = ([, row, column]) => Math.hypot(row - (r0 + r1) / 2, column - (c0 + c1) / 2);
  return found.sort((a, b) => far(a) - far(b));
}

// Draw the whole map with a pen.
export function drawMap(pen, at) {
  const inks = Object.fromEntries(["paper", "ink", "faint", "line", "accent", "hidden"].map((name) => [name, readBackground(`--${name}`)]));
  const box = getVisibleRange(at);
  pen.rect(box.x, box.y, box.width, box.height, inks.hidden);
  pen.clip(box.x, box.y, box.width, box.height, () => {
    drawPlane(pen, at);
    if (at.camera.pixels() >= WRITTEN && chooseTileLevel(at) === 0) drawNumbers(pen, at, box);
  });
  pen.frame(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1, inks.line);
  drawAxis(pen, at, box, inks, "rows");
  drawAxis(pen, at, box, inks, "columns");
  drawProfiles(pen, at, box, inks);
  drawMarks(pen, at, box, inks);
}

// Draw the visible tiles; a coarser tile replaces one that is not loaded.
function drawPlane(pen, at) {
  for (const [z, row, column] of listVisibleTiles(at, chooseTileLevel(at))) {
    for (let up = 0; z + up < at.levels; up++) {
      const tile = at.tiles.at(z + up, row >> up, column >> up);
      if (!tile) continue;
      pasteTile(pen, at, tile, z, row, column, up);
      break;
    }
  }
}

function pasteTile(pen, at, tile, z, row, column, up) {
  const side = TILE / 2 ** up; // side of the part of a coarser tile that covers this tile
  const [sx, sy] = [(column * side) % TILE, (row * side) % TILE];
  const [sw, sh] = [Math.min(side, tile.shape[1] - sx), Math.min(side, tile.shape[0] - sy)];
  if (sw <= 0 || sh <= 0) return;
  const whole = 2 ** (z + up); // tokens in a pixel
  const [key, query] = [column * TILE * 2 ** z, row * TILE * 2 ** z];
  const snap = (value) => Math.round(value * devicePixelRatio) / devicePixelRatio;
  const [x0, y0] = [snap(at.camera.across(key)), snap(at.camera.down(query))];
  const [x1, y1] = [snap(at.camera.across(key + sw * whole)), snap(at.camera.down(query + sh * whole))];
  pen.image(colorTile(tile, at.paint), [sx, sy, sw, sh], [x0, y0, x1 - x0, y1 - y0]);
}

// Write the weights as numbers.
function drawNumbers(pen, at, box) {
  const { camera } = at;
  const size = Math.min(13, camera.pixels() / 3.6);
  for (let q = Math.floor(camera.query(box.y)); q < Math.min(at.queries, camera.query(box.y + box.height)); q++) {
    for (let k = Math.floor(camera.key(box.x)); k < Math.min(at.keys, camera.key(box.x + box.width)); k++) {
      const tile = at.tiles.at(0, Math.floor(q / TILE), Math.floor(k / TILE));
      const found = tile ? at.quantity.decode(tile.codes[(q % TILE) * tile.shape[1] + (k % TILE)]) : null;
      if (found === null) continue;
      const [x, y] = [camera.across(k + 0.5), camera.down(q + 0.5)];
      pen.text(at.quantity.writeCell(found), x, y, { anchor: "middle", size, fill: chooseInk(at.quantity.shade(at.scale, found)) });
    }
  }
}

// Draw the words along an axis, or their indices where words do not fit.
function drawAxis(pen, at, box, inks, name) {
  const rows = name === "rows";
  const { camera } = at;
  const [from, to] = rows ? [camera.query(box.y), camera.query(box.y + box.height)] : [camera.key(box.x), camera.key(box.x + box.width)];
  const lit = [rows ? at.pinned.q : at.pinned.k, rows ? at.pointed?.q : at.pointed?.k];
  const wordy = camera.pixels() >= READ;
  const put = (place, text, strong) => {
    const fill = strong ? inks.accent : inks.faint;
    const weight = strong ? 600 : 400;
    const middle = place + 0.5;
    const wide = camera.pixels() > 70;
    if (rows) pen.text(text, box.x - 7, camera.down(middle), { anchor: "end", fill, weight });
    else if (wide || !strong && !wordy || text.length === 1) pen.text(text, camera.across(middle), box.y - 13, { anchor: "middle", fill, weight });
    else pen.text(text, camera.across(middle), box.y - 7, { turn: -90, fill, weight }); // a number or a single letter is not rotated
  };
  const most = at.size.width < 560 ? 8 : 13;
  const list = rows ? at.lists.rows : at.lists.columns;
  const shortenWord = (place) => formatPlainWord(at.word(list, place) ?? "", most);
  const step = wordy ? 1 : roundStep(70 / camera.pixels());
  for (let place = Math.ceil(Math.floor(from) / step) * step + 0; place < to; place += step) { // + 0: not -0
    if (lit.some((one) => one !== undefined && Math.abs(one - place) * camera.pixels() < READ)) continue;
    const middle = rows ? camera.down(place + 0.5) : camera.across(place + 0.5);
    if (middle < (rows ? box.y : box.x) - 1 || middle > (rows ? box.y + box.height : box.x + box.width) + 1) continue;
    put(place, wordy ? shortenWord(place) : formatCount(place), false);
    if (!wordy) drawTick(pen, box, middle, rows, inks);
  }
  const [kept, now] = lit.map((one) => (one !== undefined && one >= Math.floor(from) && one < to ? one : undefined));
  if (now !== undefined) put(now, shortenWord(now), true);
  if (kept !== undefined && !(Math.abs(kept - now) * camera.pixels() < READ)) put(kept, shortenWord(kept), true);
}

const drawTick = (pen, box, middle, rows, inks) =>
  rows ? pen.line(box.x - 5, middle, box.x - 1, middle, inks.faint) : pen.line(middle, box.y - 5, middle, box.y - 1, inks.faint);

// Draw the entropy of each row at the right, and the attention that each column receives below, with what they are.
function drawProfiles(pen, at, box, inks) {
  const { camera } = at;
  const [fill, size] = [formatColor(shadeWeight(0.55)), 11];
  const narrow = at.size.width < 560;
  const deep = narrow ? 20 : 36;
  const low = deep - 12;
  const side = at.profiles?.rows?.entropy;
  const under = at.profiles?.columns?.received;
  const [x, y] = [box.x + box.width + 6, box.y + box.height + 6];
  const measure = (text) => 0.55 * size * text.length;
  let room = at.size.width - box.x; // pixels for the line below
  if (side) {
    const most = Math.max(...side);
    pen.clip(x, box.y, deep, box.height, () => drawSteps(side, at.queries, (place, value) => [x + (deep * value) / Math.max(most, ROUNDING), camera.down(place)], (place) => [x, camera.down(place)], pen, fill));
    const short = at.inUnits(`spread of each row, up to ${formatThreeDigits(Math.exp(most))} tokens`);
    const long = `${short} (entropy ${formatThreeDigits(most < ROUNDING ? 0 : most)} nats)`;
    const told = measure(long) <= at.size.height - box.y ? long : short;
    if (narrow) pen.text(`${short} (at the right)`, 8, y + low + 22, { size, fill: inks.faint });
    else pen.text(told, x + deep + 8, box.y, { size, fill: inks.faint, turn: 90 });
    if (!narrow && measure(told) > box.height) room = box.width + deep + 6; // else the lines would cross
  }
  if (under) {
    const most = Math.max(...under, 1e-9);
    pen.clip(box.x, y, box.width, low, () => drawSteps(under, at.keys, (place, value) => [camera.across(place), y + (low * value) / most], (place) => [camera.across(place), y], pen, fill));
    const told = ["attention that each column receives", "received by each column"].map((text) => `${text}, up to ${formatThreeDigits(most)}`);
    const fit = narrow ? told[0] : told.find((text) => measure(text) <= room);
    if (fit) pen.text(fit, narrow ? 8 : box.x, y + low + 9, { size, fill: inks.faint });
  }
}

// Draw a profile as steps: values in bins over a number of tokens.
function drawSteps(values, tokens, at, base, pen, fill) {
  const points = [base(0)];
  values.forEach((value, n) => {
    const edges = [Math.floor((n * tokens) / values.length), Math.floor(((n + 1) * tokens) / values.length)];
    for (const edge of edges) points.push(at(edge, value ?? 0));
  });
  pen.area([...points, base(tokens)], fill);
}

// Draw a frame around the pinned cell, row or column, and a crosshair at the cell under the pointer.
function drawMarks(pen, at, box, inks) {
  const { camera } = at;
  const size = Math.max(camera.pixels(), 3);
  pen.clip(box.x - 1, box.y - 1, box.width + 2, box.height + 2, () => {
    const { q, k } = at.pinned;
    const [x, y] = [k === undefined ? box.x : camera.across(k), q === undefined ? box.y : camera.down(q)];
    const [w, h] = [k === undefined ? box.width : size, q === undefined ? box.height : size];
    if (q !== undefined || k !== undefined) pen.frame(x, y, w, h, inks.accent, 2);
    if (q !== undefined && k !== undefined) drawCross(pen, at, box, q, k, inks.accent);
    if (at.pointed) drawCross(pen, at, box, at.pointed.q, at.pointed.k, inks.ink);
  });
}

// Draw lines through a cell, with a gap around the cell.
function drawCross(pen, at, box, q, k, stroke) {
  const { camera } = at;
  if (camera.pixels() >= WRITTEN) return; // the lines would cross the numbers
  const gap = Math.max(camera.pixels() / 2, 4);
  const [x, y] = [camera.across(k + 0.5), camera.down(q + 0.5)];
  pen.line(box.x, y, x - gap, y, stroke, 0.75);
  pen.line(x, box.y, x, y - gap, stroke, 0.75);
  if (at.pointed) {
    pen.line(x + gap, y, box.x + box.width, y, stroke, 0.25);
    pen.line(x, y + gap, x, box.y + box.height, stroke, 0.25);
  }
}
