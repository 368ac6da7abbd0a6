// The Compare view: two heads, prompts or recordings side by side, and their difference.

import * as colour from "../../drawing/color.js";
import { makeDifferenceScale } from "../../drawing/legend.js";
import { formatSigned, formatThreeDigits } from "../../drawing/number_format.js";
import { createQuantity } from "../../drawing/quantity.js";
import { AXES } from "../../drawing/words.js";
import { findAttention } from "../../frame/controls.js";
import { getHeadNumber } from "../../frame/selected_word.js";
import { isAboutTarget } from "../../frame/setting_switch.js";
import { subtractWeights, listFurthestCells, chooseLevel, computeRowDistance, fetchPicture, matchWords, measureTile } from "./difference.js";
import { readModel } from "../../frame/model_choice.js";
import { clampIndex, linkRequest } from "../../frame/page_link.js";
import { DIFFERENCE, buildLayout } from "./compare_layout.js";

const LISTED = 6; // number of largest differences listed
const KEPT = 12; // maximum number of cached pictures

export const view = { name: "compare", title: "Compare", question: "What is the difference?", keepsQuestion: true, bar: ["show", "target", "scale"], mount };

// `it` is the state that the functions below share: the page, the cached pictures and words by head, and the pictures drawn.
function mount(stage, app) {
  const it = { app, kept: new Map(), drawn: null, asking: null };
  it.page = buildLayout(app, {
    change: (side, changes) => changeSide(it, side, changes),
    typed: (text, form) => runSecondText(it, text, form),
    pin: (q, k) => app.go({ q, k }, { replace: true }),
    swap: () => swapSides(it),
  });
  stage.append(it.page.root);
  return { draw: (state) => drawView(it, state), leave: () => it.asking?.abort(), keys: listKeys(it), picture: () => it.drawn && { svg: it.page.sheet() }, table: () => listNumbers(it) };
}

// Return both sides of a state: {summary, attention, place, layer}.
function listSides(it, state) {
  const { app } = it;
  const first = { summary: app.summary(), attention: app.attention(), place: app.place(), layer: app.attention().layers[state.layer] };
  return [first, chooseSecondSide(it, state, first)];
}

// Return the second side; by default the next head of the first side.
function chooseSecondSide({ app }, state, first) {
  const summary = app.shelf().find((one) => one.id === state.r2) ?? first.summary;
  const same = summary === first.summary;
  const attention = findAttention(summary, { kind: state.kind2 ?? state.kind, part: state.part2 ?? (same ? state.part : null) });
  const layer = clampIndex(state.layer2 ?? state.layer, attention.layers.length);
  const next = same && layer === state.layer ? (state.head + 1) % first.layer.heads : state.head;
  const head = clampIndex(state.head2 ?? next, attention.layers[layer].heads);
  const place = { kind: attention.kind, part: attention.part, b: clampIndex(state.b2 ?? 0, summary.batch), layer, head };
  return { summary, attention, place, layer: attention.layers[layer] };
}

async function drawView(it, state) {
  const both = listSides(it, state);
  it.page.controls(both);
  it.page.turn(state.pane === undefined ? DIFFERENCE : clampIndex(state.pane, 3));
  it.asking?.abort();
  const { signal } = (it.asking = new AbortController());
  const level = chooseLevel(...both.flatMap(({ layer }) => [layer.queries, layer.keys]));
  const show = it.app.settings.get(state);
  it.app.wait(show === "weight" ? "Loading the two heads" : `Running ${it.app.start.model}`);
  const targets = isAboutTarget(show) ? await fetchTargets(it, state, both, signal) : [];
  const quantities = both.map((_, n) => createQuantity(show, targets[n]));
  const asked = both.map((_, n) => (show === "weight" ? null : { show, at: targets[n]?.at, token: targets[n]?.token }));
  const parts = await Promise.all(both.map((side, n) => fetchOnce(it, [side.summary.id, side.place, level, asked[n]], () => fetchPictures(it, side, level, asked[n], quantities[n].decode, signal))));
  if (signal.aborted) return;
  it.app.ready();
  const common = matchWords(parts[0].words, parts[1].words);
  it.drawn = { parts, apart: subtractWeights(parts[0], parts[1], common, level), common, level, both, quantities, quantity: quantities[0] };
  renderPictures(it, state);
}

// Return the logit that each side is about: the same word in both if one model read both texts, else the likeliest of each.
async function fetchTargets({ app }, state, [first, second], signal) {
  const found = await app.source.target(first.summary.id, { at: state.at, token: state.token }, signal);
  if (first.summary === second.summary) return [found, found];
  const isShared = first.summary.model === second.summary.model;
  const at = state.at === undefined ? undefined : clampIndex(state.at, second.layer.queries);
  return [found, await app.source.target(second.summary.id, { at, token: isShared ? found.token : undefined }, signal)];
}

async function fetchPictures({ app }, { summary, attention, place, layer }, level, asked, decode, signal) {
  const book = app.book(summary.id);
  const rows = await book.words(attention.rows, 0, layer.queries);
  const columns = await book.words(attention.columns, 0, layer.keys);
  const fetch = (query) => (asked ? app.source.attribution(summary.id, { ...place, ...asked, ...query }, signal) : app.source.tile(summary.id, { ...place, ...query }, signal));
  const found = await fetchPicture(layer, level, fetch, decode);
  return { ...found, of: { rows: layer.queries, columns: layer.keys }, words: { rows, columns } };
}

async function fetchOnce({ kept }, key, ask) {
  const name = JSON.stringify(key);
  if (kept.size > KEPT) kept.delete(kept.keys().next().value);
  if (!kept.has(name)) kept.set(name, await ask());
  return kept.get(name);
}

function renderPictures(it, state) {
  const { page, app } = it;
  const { parts, apart, common, level, quantity, quantities } = it.drawn;
  const top = parts.flatMap((one) => one.weights).reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 1e-6);
  const scale = quantity.makePictureScale(state, Math.max(...parts.map((one) => one.of.columns)), top);
  const high = findLargest(apart.weights);
  const shadeDifference = quantity.isSigned ? colour.shadeSigned : colour.shadeDifference; // the same color at 0 as in the other pictures
  page.pictures(it.drawn, (value) => quantity.shade(scale, value), (value) => shadeDifference(value / high), quantities.map((one) => one.makeLegend(scale)), makeReachScale(apart.weights, high, shadeDifference));
  page.told(app.inUnits(describeDifference(it.drawn)), app.inUnits(common.said));
  page.list(level ? [] : listFurthestCells(apart, LISTED), parts);
  page.mark(it.drawn, state.q, state.k);
  const [a, b] = it.drawn.both.map(({ place, layer }) => `layer ${place.layer}, head ${getHeadNumber(layer, place.head)}`);
  app.caption(app.el("b", {}, `${a} against ${b}`), quantity.description ? ` · ${describeQuantities(quantities)} · ` : ": ", `${AXES}; in the difference, blue is more in the second, orange is less.`);
  if (state.q !== undefined && state.k !== undefined) page.exact(fetchExactWeights(it, state));
}

function describeQuantities([first, second]) {
  return first.of === second.of ? first.description : `${first.description} in the first, ${second.of} in the second`;
}

function describeDifference({ parts, apart, level, quantity }) {
  if (!apart.rows) return "";
  if (level) return `Each pixel is the mean of ${2 ** level} by ${2 ** level} ${quantity.name === "weight" ? "weights" : "numbers"}.`;
  if (quantity.name !== "weight") return describeSums(parts, quantity);
  const share = computeRowDistance(apart);
  if (share < 5e-4) return "The two have equal weights.";
  return `On average, ${formatThreeDigits(share)} of a token’s attention is on other tokens in the second (0: equal, 1: no overlap).`;
}

// Say what all numbers of each head add up to.
function describeSums(parts, { name, isSigned, of }) {
  const [first, second] = parts.map(({ weights }) => weights.reduce((sum, value) => sum + (value ?? 0), 0)).map(isSigned ? formatSigned : formatThreeDigits);
  if (name === "carried") return `In all, the first head writes ${first}, the second ${second}.`;
  const sums = name === "pull" ? `The pulls of the first head on ${of}` : `The changes of ${of} by cuts in the first head`;
  return `${sums} add up to ${first}, those of the second to ${second}.`;
}

// Fetch the exact weights of a cell on both sides; a side without the cell is null.
function fetchExactWeights({ app, drawn }, { q, k }) {
  const cell = async ({ summary, place, layer }) => (q < layer.queries && k < layer.keys ? app.source.cell(summary.id, { ...place, q, k }) : null);
  return Promise.all(drawn.both.map(cell));
}

// Change the layer, head or recording of one side; the other side stays the same.
function changeSide(it, side, changes) {
  const { kind, layer, head } = listSides(it, it.app.state())[1].place;
  const named = Object.entries(changes).map(([name, value]) => [side ? `${name}2` : name, value]);
  const chosen = changes.r && it.app.shelf().find((one) => one.id === changes.r);
  if (chosen) named.push(...(side ? [["text2", getText(chosen)], ["model2", chosen.request?.model ?? null]] : Object.entries({ ...linkRequest(chosen), at: null, token: null })));
  it.app.go({ kind2: kind, layer2: layer, head2: head, ...Object.fromEntries(named), q: null, k: null }, { replace: true });
}

function swapSides(it) {
  const [a, b] = listSides(it, it.app.state());
  const other = Object.fromEntries(Object.entries(a.place).map(([name, value]) => [`${name}2`, value]));
  it.app.go({ ...b.place, r: b.summary.id, ...linkRequest(b.summary), ...other, r2: a.summary.id, text2: getText(a.summary), model2: a.summary.request?.model ?? null, q: null, k: null, at: null, token: null });
}

// Return the text from which the recording of the second side can be made again, or null.
const getText = ({ request }) => (request?.tokens === undefined ? request?.text ?? null : null);

// Run a model on a text, by default that of the first side, and show it on the second side.
async function runSecondText({ app }, typed, form) {
  const text = typed.trim() ? typed : getText(app.summary()) ?? "";
  if (!text) return app.fail("Type a text first.", form);
  const model = readModel(form);
  app.wait(`Running ${model ?? app.start.model}`);
  try {
    const summary = await app.source.type({ text, model });
    app.add(summary);
    const { layer, head } = app.state();
    return app.go({ r2: summary.id, text2: getText(summary), model2: summary.request?.model ?? null, kind2: null, part2: null, b2: null, layer2: layer, head2: head, q: null, k: null });
  } catch (fault) {
    return app.fail(fault.message, form);
  } finally {
    app.ready();
  }
}

// Return the numbers of both sides and of the difference as records; a pixel of a long text stands at its first query and key.
async function listNumbers({ app, drawn }) {
  if (!drawn) return [];
  const { name } = drawn.quantity;
  const parts = name === "weight" ? await Promise.all(drawn.both.map((side, n) => fetchExactPicture(app, side, drawn.parts[n], drawn.level))) : drawn.parts;
  const apart = subtractWeights(...parts, drawn.common, drawn.level);
  const side = 2 ** drawn.level;
  return [["first", parts[0]], ["second", parts[1]], ["difference", apart]].flatMap(([picture, { weights, columns }]) =>
    weights.map((weight, n) => ({ picture, query: Math.floor(n / columns) * side, key: (n % columns) * side, [name]: weight })).filter((one) => one[name] !== null));
}

// Fetch the weights of a side with every digit.
async function fetchExactPicture({ source }, { summary, place, layer }, part, level) {
  const fetch = async (query) => ({ codes: await source.exact(summary.id, "tile", { ...place, ...query }), shape: measureTile(part, query) });
  return { ...part, ...(await fetchPicture(layer, level, fetch, (number) => (Number.isNaN(number) ? null : number))) };
}

function stepCell(it, rows, columns) {
  if (!it.drawn) return;
  const { q = 0, k = 0 } = it.app.state();
  const [queries, keys] = ["rows", "columns"].map((axis) => Math.max(...it.drawn.parts.map((one) => one.of[axis])));
  it.app.go({ q: clampIndex(q + rows, queries), k: clampIndex(k + columns, keys) }, { replace: true });
}

function turnHead(it, by) {
  const { place, layer } = listSides(it, it.app.state())[1];
  changeSide(it, 1, { head: clampIndex(place.head + by, layer.heads) });
}

const listKeys = (it) => [
  ["ArrowUp", "previous query", () => stepCell(it, -1, 0)],
  ["ArrowDown", "next query", () => stepCell(it, 1, 0)],
  ["ArrowLeft", "previous key", () => stepCell(it, 0, -1)],
  ["ArrowRight", "next key", () => stepCell(it, 0, 1)],
  ["}", "next head of the second", () => turnHead(it, 1)],
  ["{", "previous head of the second", () => turnHead(it, -1)],
  ["x", "swap the sides", () => swapSides(it)],
];

// Return the difference of the full color, the 99th percentile, so that a few larger ones do not fade the others.
function findLargest(weights) {
  const sizes = weights.filter((value) => value).map(Math.abs).sort((a, b) => a - b);
  return colour.roundUp(Math.max(sizes[Math.floor(0.99 * sizes.length)] ?? 0, 1e-6));
}

function makeReachScale(weights, high, shade) {
  const marks = makeDifferenceScale(high, shade);
  if (!weights.some((value) => Math.abs(value ?? 0) > high)) return marks;
  return { ...marks, ticks: marks.ticks.map(([place, text]) => [place, place === 0.5 ? text : place ? `${text} or more` : `${text} or less`]) };
}
