// The Heads view: every head as a small picture with its kind, sorted or filtered by the scores of the detectors.

import { el } from "../../drawing/elements.js";
import { formatThreeDigits } from "../../drawing/number_format.js";
import { paintCodes } from "../../drawing/matrix_image.js";
import { AXES } from "../../drawing/words.js";
import { getHeadNumber } from "../../frame/selected_word.js";
import { renderClearestHeads } from "./clearest_heads.js";
import { EFFECT, SENTENCES, isProbed, renderHeadControls } from "./kind_filter.js";
import { exportSheet } from "./svg_sheet.js";
import { createVisibilityPanel } from "./visibility_panel.js";

const THUMB = 48; // pixels along a side of a thumbnail
const MOST = 12; // maximum number of heads of a layer that stand in one row
const AHEAD = "300px"; // distance from the window at which thumbnails are fetched

export const view = {
  name: "heads",
  title: "Heads",
  question: "Which heads are interesting?",
  bar: ["attention", "batch", "show", "sink", "target", "scale"],
  mount,
};

const NOTHING = () => ({ rows: new Map(), detectors: [], notes: [], telling: [], thumbs: new Map(), tiles: new Map(), places: new Map(), whole: false, laid: "" });

// `it` is the state that the functions below share: the parts of the page, and for its recording the scores of the heads by
// name, the detectors once all heads are scored, the thumbnails by layer, and the tiles by name.
function mount(stage, app) {
  stage.classList.add("heads");
  const controls = el("div", { class: "heads-controls" });
  const said = el("p", { class: "note heads-said", "aria-live": "polite" });
  const sheet = el("div", { class: "heads-sheet" });
  const told = el("p", { class: "note" });
  const clearest = el("section", { class: "clearest", "aria-label": "The clearest heads" });
  const seen = createVisibilityPanel(app);
  stage.append(controls, seen.element, clearest, said, sheet, told);
  const it = { app, controls, clearest, said, sheet, told, seen, of: "", control: new AbortController(), pictures: new AbortController(), ...NOTHING() };
  it.near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) fetchThumbnails(it, Number(target.dataset.layer));
  }, { root: stage, rootMargin: AHEAD });
  const leave = () => (it.control.abort(), it.pictures.abort(), it.near.disconnect(), seen.leave());
  return { draw: (state) => drawView(it, state), leave, keys: listKeys(it), picture: () => ({ svg: exportSheet(stage) }), table: () => listScores(it) };
}

const getLayers = ({ layers }) => layers;
const getHeadName = (it, layer, head) => `${layer}.${getHeadNumber(getLayers(it)[layer], head)}`; // with the number of the head in the model
const getHeadRow = (it, one) => it.rows.get(one.name);

// List every head as {layer, head, name}.
function getAllTiles(it) {
  return getLayers(it).flatMap(({ heads }, layer) => Array.from({ length: heads }, (_, head) => ({ layer, head, name: getHeadName(it, layer, head) })));
}

// Return the layer and the head of a row of scores, as they are counted in the recording.
function findPlace(it, row) {
  const { layer, head } = it.places.get(`${row.layer}.${row.head}`);
  return { layer, head };
}

// List the heads that are shown, in their order.
function listShownHeads(it, state) {
  const kept = getAllTiles(it).filter((one) => !state.only || getHeadRow(it, one)?.kind === state.only);
  if (!isSorted(it, state)) return kept;
  const score = (one) => (state.by === EFFECT ? Math.abs(getTotal(it, one)) : getHeadRow(it, one)?.scores[state.by] ?? -Infinity);
  return kept.sort((a, b) => score(b) - score(a));
}

// Return whether the heads are sorted: all numbers of the order are known.
function isSorted(it, { by }) {
  if (by === EFFECT) return Boolean(it.shown) && getLayers(it).every((_, layer) => it.thumbs.get(layer)?.totals);
  return it.whole && it.detectors.includes(by);
}

// Return the sum of what is shown over a head, or undefined until it is known.
const getTotal = (it, { layer, head }) => it.thumbs.get(layer)?.totals?.[head];

function drawView(it, state) {
  const { app } = it;
  it.layers = app.attention().layers;
  const of = JSON.stringify([app.shownId(), state.kind, state.part, state.b, isProbed(app, state)]);
  const shown = app.settings.get(state) === "weight" ? null : app.settings.query(state);
  const isOther = JSON.stringify(shown) !== JSON.stringify(it.shown);
  it.shown = shown;
  if (of !== it.of) resetView(it, of);
  else if (isOther) resetThumbnails(it);
  if (shown && state.by === EFFECT) getLayers(it).forEach((_, layer) => fetchThumbnails(it, layer)); // the order needs all of them
  shadeAll(it, state);
  selectTile(it, state);
  return it.seen.draw(state);
}

// Reset the view for another recording or another text of its batch.
function resetView(it, of) {
  it.control.abort();
  it.pictures.abort();
  it.near.disconnect();
  it.clearest.replaceChildren();
  Object.assign(it, NOTHING(), { of, control: new AbortController(), pictures: new AbortController() });
  it.places = new Map(getAllTiles(it).map((one) => [one.name, one]));
  it.tiles = new Map(getAllTiles(it).map((one) => [one.name, createTile(it, one)]));
  fetchKinds(it).catch((fault) => {
    if (fault.name === "AbortError") return;
    it.app.ready();
    it.app.fail(fault.message, it.controls);
  });
}

// Fetch the thumbnails of another setting; until they arrive, the pictures are empty and marked.
function resetThumbnails(it) {
  it.pictures.abort();
  it.near.disconnect();
  Object.assign(it, { thumbs: new Map(), pictures: new AbortController() });
  for (const element of it.tiles.values()) {
    const canvas = element.querySelector("canvas");
    canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
    it.near.observe(element);
  }
}

// Fetch the kinds of the heads, one line per head, and label each head as soon as its line arrives.
async function fetchKinds(it) {
  const { app } = it;
  const { signal } = it.control;
  const { kind, part } = app.place();
  const probed = isProbed(app, app.state());
  const said = probed ? `Probing ${app.summary().model} on repeated random tokens` : "Classifying the heads";
  const started = performance.now();
  app.wait(said);
  for await (const line of probed ? app.source.probe(app.summary().id, signal) : app.source.heads(app.shownId(), { kind, part }, signal)) {
    if (signal.aborted || app.state().view !== "heads") return;
    if (line.progress) app.wait(`${said}: ${line.progress}${estimateRest(started, line)}`, line.share);
    else if (line.row) {
      it.rows.set(`${line.row.layer}.${line.row.head}`, line.row);
      app.wait(said, line.done / line.of);
      const one = it.places.get(`${line.row.layer}.${line.row.head}`);
      if (one) labelTile(it, app.state(), one, app.settings.quantity(app.state()));
    } else {
      Object.assign(it, { detectors: line.detectors, notes: line.notes, telling: line.telling, whole: true });
      selectTile(it, app.state());
    }
  }
  app.ready();
  markBusy(it);
}

// Say how long a wait still takes, by what was done since its start; nothing in the first seconds.
function estimateRest(started, { share }) {
  const seconds = (performance.now() - started) / 1000;
  return seconds < 3 ? "" : `, some ${Math.ceil((seconds * (1 - share)) / share)} s left`;
}

// Fetch the thumbnails of a layer.
async function fetchThumbnails(it, layer) {
  const { app } = it;
  const { thumbs, shown } = it;
  if (thumbs.has(layer)) return;
  thumbs.set(layer, null);
  markBusy(it);
  const { kind, part, b } = app.place();
  try {
    const fetch = shown ? app.source.attributionThumbs : app.source.thumbs;
    thumbs.set(layer, await fetch(app.shownId(), { kind, part, b, layer, ...shown }, it.pictures.signal));
    if (thumbs !== it.thumbs) return; // another setting is shown by now
    if (shown) shadeAll(it, app.state());
    else shadeLayer(it, layer);
    if (shown) selectTile(it, app.state()); // with its sums
    else describePicture(it, app.state());
  } catch (fault) {
    if (fault.name === "AbortError") return;
    thumbs.delete(layer);
    app.fail(fault.message, it.controls);
  } finally {
    if (thumbs === it.thumbs) markBusy(it);
  }
}

// Mark the pictures that the model is run for, and say so; the wait for the kinds of the heads comes first.
function markBusy(it) {
  const asked = [...it.thumbs].filter(([, found]) => !found).map(([layer]) => layer);
  for (const element of it.tiles.values()) element.toggleAttribute("data-busy", Boolean(it.shown) && asked.includes(Number(element.dataset.layer)));
  if (!it.shown || !it.whole) return;
  if (asked.length) it.app.wait(`Running ${it.app.start.model}`, 1 - asked.length / it.thumbs.size);
  else it.app.ready();
}

// Draw all thumbnails in one scale, and its legend.
function shadeAll(it, state) {
  const { app } = it;
  const { keys } = getLayers(it)[state.layer];
  const quantity = app.settings.quantity(state);
  const found = [...it.thumbs.values()].filter(Boolean);
  const scale = quantity.makePictureScale(state, keys, it.shown ? Math.max(...found.map(({ codes }) => quantity.measure(codes)), 0) : 1);
  it.paint = quantity.paint(scale);
  app.legend(quantity.makeLegend(scale, null, keys > THUMB ? "largest " : ""));
  for (const layer of it.thumbs.keys()) shadeLayer(it, layer);
}

// Draw the thumbnails of a layer in the colors of the current scale.
function shadeLayer(it, layer) {
  const found = it.thumbs.get(layer);
  if (!found) return;
  const [count, rows, columns] = found.shape;
  for (let head = 0; head < count; head++) {
    const canvas = it.tiles.get(getHeadName(it, layer, head))?.querySelector("canvas");
    if (canvas) paintCodes(canvas, found.codes.subarray(head * rows * columns, (head + 1) * rows * columns), rows, columns, it.paint);
  }
}

function createTile(it, one) {
  const [score, kind] = ["head-score numbers", "head-kind"].map((name) => el("span", { class: name }));
  const element = el("a", { class: "head", "data-layer": one.layer, "data-head": one.head },
    el("canvas", { "aria-hidden": "true" }), el("span", { class: "head-name numbers" }, one.name), score, kind);
  it.near.observe(element);
  return element;
}

// Update the names, scores and links of all tiles in place.
function labelTiles(it, state) {
  const quantity = it.app.settings.quantity(state);
  for (const one of it.places.values()) labelTile(it, state, one, quantity);
}

function labelTile(it, state, one, { name, write, format, isSigned }) {
  const { layer, head } = one;
  const [element, found] = [it.tiles.get(one.name), getHeadRow(it, one)];
  const scores = Object.entries(found?.scores ?? {}).map(([key, value]) => `${key} ${formatThreeDigits(value)}`);
  const total = getTotal(it, { layer, head });
  if (total !== undefined) scores.push(`sum of ${name} ${isSigned ? format(total) : write(total)}`);
  element.href = it.app.link({ view: "map", layer, head, heads: null, x: null, y: null, zoom: null });
  element.title = found ? [`${found.kind}: ${found.sentence}`, ...scores].join("\n") : "";
  element.querySelector(".head-score").textContent = state.by === EFFECT ? (total === undefined ? "" : write(total)) : it.detectors.includes(state.by) ? formatThreeDigits(found?.scores[state.by]) : "";
  element.querySelector(".head-kind").textContent = found?.kind ?? "";
  element.setAttribute("aria-label", `Layer ${layer}, head ${getHeadNumber(getLayers(it)[layer], head)}${found ? `, ${found.kind}` : ""}: open in Map`);
  element.classList.toggle("chosen", layer === state.layer && head === state.head);
}

// Arrange the tiles: by layer if they are neither sorted nor filtered.
function layOutTiles(it, state) {
  const shown = listShownHeads(it, state);
  const grouped = shown.length && !isSorted(it, state) && !state.only;
  const order = JSON.stringify([grouped, shown.map((one) => one.name)]);
  if (order === it.laid) return;
  it.laid = order;
  const line = (title, heads) => el("section", { class: "heads-layer" }, title && el("h2", {}, title), el("div", { class: "heads-row" }, heads.map((one) => it.tiles.get(one.name))));
  const drawLayer = (_, layer) => line(`layer ${layer}`, shown.filter((one) => one.layer === layer));
  const most = Math.max(...getLayers(it).map(({ heads }) => heads));
  it.sheet.style.setProperty("--heads", Math.min(most, MOST));
  it.sheet.classList.toggle("heads-many", most > MOST);
  it.sheet.replaceChildren(...(grouped ? getLayers(it).map(drawLayer) : [line(null, shown)]));
  if (!shown.length) it.sheet.append(el("p", { class: "note" }, "No head is of this kind on this text."));
}

function selectTile(it, state) {
  renderHeadControls(it.controls, it.app, state, it);
  layOutTiles(it, state);
  labelTiles(it, state);
  if (it.whole) it.clearest.replaceChildren(...renderClearestHeads(it.app, [...it.rows.values()], it.telling, (row) => findPlace(it, row)));
  it.said.textContent = describeKind(it, state);
  it.told.textContent = [isProbed(it.app, state) && "Kinds and scores are those of the probe, repeated random tokens; the pictures show this text.", ...it.notes.map(capitalize)].filter(Boolean).join(" ");
  describePicture(it, state);
}

// Describe the kind of the filter, or else what the selected head does and how sure that is.
function describeKind(it, { only, layer, head }) {
  if (only) return `${only}: ${SENTENCES[only] ?? ""}`;
  const found = it.rows.get(getHeadName(it, layer, head));
  return found ? `Head ${getHeadName(it, layer, head)} is selected; it ${found.kind === "unclear" ? "has " : ""}${found.sentence}.` : "";
}

function describePicture(it, state) {
  const { queries, keys } = getLayers(it)[state.layer];
  const some = [...it.thumbs.values()].some((one) => one?.sampled) ? "the largest weight of some of its rows" : `its largest ${it.app.settings.quantity(state).noun}`;
  const pooled = Math.max(queries, keys) > THUMB ? `; each pixel shows ${some}` : "";
  const count = `${formatPlural(getAllTiles(it).length, "head")} in ${formatPlural(getLayers(it).length, "layer")}`;
  const { layer, head, name } = getAllTiles(it).at(-1);
  it.app.caption(el("b", {}, count), ` · ${name} is head ${getHeadNumber(getLayers(it)[layer], head)} of layer ${layer}; ${AXES}${pooled}`);
}

// Return the scores of the shown heads as records, in their order.
function listScores(it) {
  return listShownHeads(it, it.app.state()).map((one) => {
    const { kind = null, sentence = null, scores = {} } = getHeadRow(it, one) ?? {};
    const total = getTotal(it, one);
    const sum = total === undefined ? {} : { [`sum of ${it.app.settings.quantity(it.app.state()).name}`]: total };
    return { layer: one.layer, head: getHeadNumber(getLayers(it)[one.layer], one.head), kind, sentence, ...scores, ...sum };
  });
}

// Select another of the shown heads: step(index of the selected head) returns its index.
function stepHead(it, step) {
  const state = it.app.state();
  const shown = listShownHeads(it, state);
  const now = shown.findIndex((one) => one.layer === state.layer && one.head === state.head);
  const next = shown[Math.min(Math.max(step(now), 0), shown.length - 1)];
  if (!next) return;
  it.app.go({ layer: next.layer, head: next.head, heads: null }, { replace: true });
  it.tiles.get(next.name).focus({ preventScroll: false });
}

// Return the number of pictures in a row.
function countColumns({ sheet }) {
  const [first, ...rest] = sheet.querySelectorAll(".head");
  const next = rest.findIndex((one) => one.offsetTop > first.offsetTop);
  return next < 0 ? rest.length + 1 : next + 1;
}

const listKeys = (it) => [
  ["ArrowLeft", "previous head", () => stepHead(it, (now) => now - 1)],
  ["ArrowRight", "next head", () => stepHead(it, (now) => now + 1)],
  ["ArrowUp", "head above", () => stepHead(it, (now) => now - countColumns(it))],
  ["ArrowDown", "head below", () => stepHead(it, (now) => now + countColumns(it))],
  ["Enter", "open the head in Map", () => it.app.go({ view: "map", heads: null })],
];

const formatPlural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

const capitalize = (text) => text.charAt(0).toUpperCase() + text.slice(1);
