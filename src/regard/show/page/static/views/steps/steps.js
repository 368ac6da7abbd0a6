// The Steps view: the computation of one head, one step at a time, with its numbers and switches.

import { clampIndex } from "../../frame/page_link.js";
import { chooseQuery, getStateHeadNumber } from "../../frame/selected_word.js";
import { AXES } from "../../drawing/words.js";
import { writeArithmetic } from "./arithmetic.js";
import { fetchEffect } from "./effect_scene.js";
import { makeNamer } from "./narration.js";
import { exportPanels, formatTabbed } from "./number_table.js";
import { buildScenes } from "./step_scenes.js";
import { formatHeading, buildLayout } from "./steps_layout.js";
import { readSettings, createSwitches, UNTOUCHED } from "./switches.js";
import { createTrace } from "./weight_trace.js";

const NARROW = matchMedia("(max-width: 900px)"); // one column: the pictures of a weight stand above the tables

export const view = {
  name: "steps",
  title: "Steps",
  question: "How is each number computed?",
  keepsQuestion: true,
  bar: (state) => (state.r && !state.example ? ["attention", "batch", "layer", "head", "show", "target"] : []),
  mount,
};

// `it` is the state that the functions below share: the page and its switches, the loaded answer, its scenes, and the
// selection: the scene, the query, the key, and the number of the context.
function mount(stage, app) {
  const it = { app, loaded: { key: null, data: null }, effect: null, told: null, at: { row: 0, column: 0, number: 0 }, asking: null };
  it.page = buildLayout(app, (by) => moveScene(it, by), (step) => app.go({ step }, { replace: true }));
  it.switched = createSwitches((changes) => app.go(changes, { replace: true }));
  it.trace = createTrace();
  it.page.side.prepend(it.switched.element);
  const placeTrace = () => it.page.placeTrace(it.trace.element, NARROW.matches);
  placeTrace();
  NARROW.addEventListener("change", placeTrace);
  it.page.onCopy(() => copyNumbers(it));
  stage.classList.add("steps");
  stage.append(it.page.root);
  return { draw: (state) => drawView(it, state), leave: () => (it.asking?.abort(), NARROW.removeEventListener("change", placeTrace)), keys: listKeys(it), picture: () => exportPicture(it), table: () => listNumbers(it) };
}

// Return the example that a state shows in place of a recording, or null; and the names of its query and key in the link.
const getExample = ({ app }, state) => state.example ?? (app.summary() ? null : "simple");
const getAxisNames = (it, state) => (getExample(it, state) ? ["row", "column"] : ["q", "k"]);

async function drawView(it, state) {
  it.page.pick(getExample(it, state));
  const key = makeCacheKey(it, state);
  if (key !== it.loaded.key) {
    await loadData(it, state, key);
    state = it.app.state();
  }
  await loadEffect(it, state);
  renderScenes(it, it.app.state());
}

// Return the cache key of an answer; a long text has an answer for each query.
function makeCacheKey(it, state) {
  const { app } = it;
  const example = getExample(it, state);
  if (example) return `${example} ${state.head}`;
  return JSON.stringify([state.r, app.place(), isLong(app, state) ? chooseQuery(app, state) : null]);
}

function isLong(app, state) {
  const { queries, keys } = app.attention().layers[state.layer];
  return Math.max(queries, keys) > app.start.limits.steps;
}

async function loadData(it, state, key) {
  const { app } = it;
  const example = getExample(it, state);
  it.asking?.abort();
  const { signal } = (it.asking = new AbortController());
  app.wait("Loading the steps");
  const asked = example ? app.source.example({ name: example, head: state.head }, signal) : app.source.steps(state.r, { ...app.place(), q: isLong(app, state) ? chooseQuery(app, state) : null }, signal);
  it.loaded = { key, data: await asked };
  app.ready();
}

// Load the numbers of what the switch selects besides the weight, for the recording that is shown.
async function loadEffect(it, state) {
  const { app } = it;
  const { key, data } = it.loaded;
  const name = getExample(it, state) ? "weight" : app.settings.get(state);
  const asked = name === "weight" ? null : app.settings.query(state);
  const subject = JSON.stringify([key, asked]);
  if (it.effect?.subject !== subject) {
    it.effect = asked && { subject, values: null };
    if (!asked) return;
    app.wait(`Running ${app.start.model}`);
    const loading = it.effect;
    try {
      loading.values = await fetchEffect(app, { summary: app.summary(), place: app.place(), asked, data, query: chooseQuery(app, state) }, it.asking.signal);
    } catch (fault) {
      if (it.effect === loading) it.effect = null; // asked for again when something changes
      throw fault;
    }
    app.ready();
  }
  if (it.effect) it.effect.quantity = app.settings.quantity(state); // the word of the logit may be known by now
}

function renderScenes(it, state) {
  const { app, page, at } = it;
  const { data } = it.loaded;
  placeInScene(it, state);
  page.head(data, (head) => app.go({ head }));
  page.steps(it.told.scenes.map((scene) => scene.name), at.scene);
  it.switched.draw(data, state);
  page.bars(it.told, data, at, { pickColumn: (column) => selectCell(it, at.row, column), pickRow: (row) => selectCell(it, row), hover: (column) => showNumber(it, at.row, column ?? at.column) });
  renderScene(it);
  describePicture(it, state);
}

// Build the scenes for the query of a state, and select its step and key; the default key is that of the largest weight.
function placeInScene(it, state) {
  const { at } = it;
  const { data } = it.loaded;
  const [row, column] = getAxisNames(it, state).map((name) => state[name]);
  at.row = data.partial || row === undefined ? chooseRow(it, state) : clampIndex(Number(row), data.rows.length);
  it.told = buildScenes(data, readSettings(state), at.row, it.effect?.values && it.effect);
  for (const scene of it.told.scenes) scene.sentence = it.app.inUnits(scene.sentence);
  const weights = it.told.own?.weights[at.row] ?? [];
  const most = weights.indexOf(Math.max(...weights));
  at.column = column === undefined ? most : clampIndex(Number(data.partial ? data.places.indexOf(Number(column)) : column), data.columns.length);
  const names = it.told.scenes.map((one) => one.name);
  at.scene = Math.max(names.indexOf(state.step), 0); // by default the first: q, k and v
}

// Return the default query, the same as in the other views; an example has its own.
const chooseRow = (it, state) => (it.loaded.data.partial || getExample(it, state) ? it.loaded.data.focus : chooseQuery(it.app, state));

const getScene = (it) => it.told.scenes[it.at.scene];
const isContextScene = (it) => getScene(it).name === "context";
const isProjectedScene = (it) => getScene(it).name.startsWith("q, k");

function renderScene(it) {
  const pick = getScene(it).live ? pickCell : it.told.own && isProjectedScene(it) ? pickWord : null;
  it.page.scene(getScene(it), it.at, pick ? { pick: (...place) => pick(it, ...place) } : {});
  showSelected(it);
}

// Show the calculation and the pictures of the selected number.
const showSelected = (it) => showNumber(it, it.at.row, isContextScene(it) ? it.at.number : it.at.column);

// Show the calculation of a number under the pointer or of the selected one, and the pictures of how its weight came about; those
// of a number of the context are about the selected key.
function showNumber(it, row, column) {
  showArithmetic(it, row, column);
  const { data } = it.loaded;
  const key = isContextScene(it) ? it.at.column : column;
  it.trace.element.hidden = !it.told.own || key < 0;
  if (it.trace.element.hidden) return;
  const query = makeNamer(data.rows)(row);
  it.trace.draw({ problem: it.told.problem, steps: it.told.steps, query, nameKey: makeNamer(data.columns, data.places) }, row, key);
}

// Show the calculation of the number under the pointer or of the selected number.
function showArithmetic(it, row, column) {
  const now = getScene(it);
  const { data } = it.loaded;
  if (!now.live || column < 0) return it.page.sum("");
  const asks = makeNamer(data.rows)(row);
  const of = isContextScene(it) ? `number ${column + 1} of ${asks}` : `${asks} → ${makeNamer(data.columns, data.places)(column)}`;
  if (now.effect) return it.page.sum(of, now.write(row, column), it.told.effect.values[row][column]);
  return it.page.sum(of, writeArithmetic(now.name, it.told.problem, it.told.steps, row, column), it.told.steps[now.name][row][column]);
}

// Handle the pointer over a cell or over none, and a click on a cell or on the word of a row.
function pickCell(it, first, second, hovering = false) {
  const { at } = it;
  const [row, column] = getScene(it).panels[0].upright && first !== null ? [at.row, first] : [first, second];
  if (hovering && row === null) return showSelected(it);
  if (hovering) return showNumber(it, row, column);
  if (isContextScene(it) && column !== null) at.number = column;
  else if (column !== null) return selectCell(it, row, column);
  return selectCell(it, row);
}

// Handle the pointer over a row of q, k or v, and a click on it: a row of q is of a query, those of k and v are of a key.
function pickWord(it, row, number, hovering, panel) {
  const { at } = it;
  const isQuery = panel === 0;
  if (hovering) return row === null ? showSelected(it) : showNumber(it, isQuery ? row : at.row, isQuery ? at.column : row);
  return isQuery ? selectCell(it, row) : selectCell(it, at.row, row);
}

// Set the query of the link, and its key if one is given.
function selectCell(it, row, column) {
  const [rows, columns] = getAxisNames(it, it.app.state());
  const { data } = it.loaded;
  const changes = data.partial ? {} : { [rows]: row };
  if (column !== undefined) changes[columns] = data.partial ? data.places[column] : column;
  it.app.go(changes, { replace: true });
}

function moveScene(it, by) {
  if (!it.told) return;
  const next = clampIndex(it.at.scene + by, it.told.scenes.length);
  it.app.go({ step: it.told.scenes[next].name }, { replace: true });
}

// Select the next or previous query; for a long text its row is fetched.
function turnHead(it, by) {
  const { app, at } = it;
  if (!it.told?.own) return;
  if (!it.loaded.data.partial) return selectCell(it, clampIndex(at.row + by, it.loaded.data.rows.length));
  const count = app.attention().layers[app.state().layer].queries;
  app.go({ q: clampIndex(chooseQuery(app, app.state()) + by, count) }, { replace: true });
}

function stepColumn(it, by) {
  if (it.told?.own) selectCell(it, it.at.row, clampIndex(it.at.column + by, it.loaded.data.columns.length));
}

function describePicture(it, state) {
  const { app } = it;
  const { data } = it.loaded;
  const captionExample = () => [app.el("b", {}, data.title), data.source ? `, ${data.source} (notes that code attention from scratch; nothing else is needed to follow them)` : ""];
  const captionHead = () => [app.el("b", {}, `Layer ${state.layer}, head ${getStateHeadNumber(app, state)}`), ` of ${app.summary().model}`];
  app.caption(...(getExample(it, state) ? captionExample() : captionHead()), app.inUnits(describeAxes(data, getScene(it))));
}

// Return what the sides of the tables of a scene are.
function describeAxes(data, { panels }) {
  if (!data.rows.length) return ".";
  if (panels.some(({ axes }) => axes === "words")) return ": rows are tokens, columns are the numbers of their vectors.";
  return data.partial ? ": rows are keys, the column is the query." : `: ${AXES}.`;
}

function copyNumbers(it) {
  const now = it.told && getScene(it);
  if (!now?.panels.length) return;
  const text = now.panels.map(formatTabbed).join("\n\n");
  navigator.clipboard?.writeText(text).then(() => it.page.copied(), () => it.page.copied("The browser does not allow copying."));
}

const listKeys = (it) => [
  ["ArrowRight", "next step; with Shift, next key", (event) => (event.shiftKey ? stepColumn(it, 1) : moveScene(it, 1))],
  ["ArrowLeft", "previous step; with Shift, previous key", (event) => (event.shiftKey ? stepColumn(it, -1) : moveScene(it, -1))],
  ["ArrowDown", "next query", () => turnHead(it, 1)],
  ["ArrowUp", "previous query", () => turnHead(it, -1)],
  ["c", "copy the numbers with every digit", () => copyNumbers(it)],
  ["Escape", "reset the switches and the selection", () => it.app.go({ ...UNTOUCHED, q: null, k: null, row: null, column: null }, { replace: true })],
];

// Return the numbers of the tables of the step as records.
const listNumbers = (it) => it.told && getScene(it).panels.flatMap(({ title, rows, columns, values }) =>
  values.flatMap((row, i) => row.map((value, j) => ({ step: getScene(it).name, table: title, row: rows[i], column: columns[j], value }))));

const exportPicture = (it) => it.told && { svg: exportPanels(`${it.loaded.data.title}: ${formatHeading(getScene(it))}`, getScene(it).panels) };
