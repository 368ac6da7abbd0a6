// The Steps view: the computation of one head, one step at a time, with its numbers and switches.

import { getStateHeadNumber } from "../../frame/controls.js";
import { chooseQuery } from "../../frame/selected_word.js";
import { writeArithmetic } from "./arithmetic.js";
import { makeNamer } from "./narration.js";
import { exportPanels, formatTabbed } from "./number_table.js";
import { getNaming, buildScenes } from "./step_scenes.js";
import { formatHeading, buildLayout } from "./steps_layout.js";
import { readSettings, createSwitches, UNTOUCHED } from "./switches.js";

export const view = {
  name: "steps",
  title: "Steps",
  question: "How is each number computed?",
  bar: (state) => (state.r && !state.example ? ["attention", "batch", "layer", "head"] : []),
  mount,
};

// `it` is the state that the functions below share: the page and its switches, the loaded answer, its scenes, and the
// selection: the scene, the query, the key, and the number of the context.
function mount(stage, app) {
  const it = { app, loaded: { key: null, data: null }, told: null, at: { row: 0, column: 0, number: 0 }, asking: null };
  it.page = buildLayout(app, (by) => moveScene(it, by), (step) => app.go({ step }, { replace: true }));
  it.switched = createSwitches((changes) => app.go(changes, { replace: true }));
  it.page.side.prepend(it.switched.element);
  it.page.onCopy(() => copyNumbers(it));
  stage.classList.add("steps");
  stage.append(it.page.root);
  return { draw: (state) => drawView(it, state), leave: () => it.asking?.abort(), keys: listKeys(it), picture: () => exportPicture(it) };
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
  renderScenes(it, state);
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

function renderScenes(it, state) {
  const { app, page, at } = it;
  const { data } = it.loaded;
  placeInScene(it, state);
  page.head(data, (head) => app.go({ head }));
  page.steps(it.told.scenes.map((scene) => scene.name), at.scene);
  it.switched.draw(data, state);
  page.bars(it.told, data, at, (column) => selectCell(it, at.row, column), (row) => selectCell(it, row));
  renderScene(it);
  describePicture(it, state);
}

// Build the scenes for the query of a state, and select its step and key; the default key is that of the largest weight.
function placeInScene(it, state) {
  const { at } = it;
  const { data } = it.loaded;
  const [row, column] = getAxisNames(it, state).map((name) => state[name]);
  at.row = data.partial || row === undefined ? chooseRow(it, state) : clampIndex(Number(row), data.rows.length);
  it.told = buildScenes(data, readSettings(state), at.row);
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

function renderScene(it) {
  it.page.scene(getScene(it), it.at, getScene(it).live ? { pick: (...place) => pickCell(it, ...place) } : {});
  showArithmetic(it, it.at.row, isContextScene(it) ? it.at.number : it.at.column);
}

// Show the calculation of the number under the pointer or of the selected number.
function showArithmetic(it, row, column) {
  const now = getScene(it);
  const { data } = it.loaded;
  if (!now.live || column < 0) return it.page.sum("");
  const asks = makeNamer(data.rows, { quoted: !data.before })(row);
  const of = isContextScene(it) ? `number ${column + 1} of ${asks}` : `${asks} → ${makeNamer(data.columns, getNaming(data))(column)}`;
  return it.page.sum(of, writeArithmetic(now.name, it.told.problem, it.told.steps, row, column), it.told.steps[now.name][row][column]);
}

// Handle the pointer over a cell or over none, and a click on a cell or on the word of a row.
function pickCell(it, first, second, hovering = false) {
  const { at } = it;
  const [row, column] = getScene(it).panels[0].upright && first !== null ? [at.row, first] : [first, second];
  if (hovering && row === null) return showArithmetic(it, at.row, isContextScene(it) ? at.number : at.column);
  if (hovering) return showArithmetic(it, row, column);
  if (isContextScene(it) && column !== null) at.number = column;
  else if (column !== null) return selectCell(it, row, column);
  return selectCell(it, row);
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
  const ofExample = () => [app.el("b", {}, data.title), data.source ? `, ${data.source}` : ""];
  const ofHead = () => [app.el("b", {}, `Layer ${state.layer}, head ${getStateHeadNumber(app, state)}`), ` of ${app.summary().model}`];
  const axes = data.partial ? ": rows are keys, the column is the query." : data.rows.length ? ": rows are queries, columns are keys." : ".";
  app.caption(...(getExample(it, state) ? ofExample() : ofHead()), axes);
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

const exportPicture = (it) => it.told && { svg: exportPanels(`${it.loaded.data.title}: ${formatHeading(getScene(it))}`, getScene(it).panels) };

const clampIndex = (value, count) => Math.min(Math.max(Math.trunc(value) || 0, 0), Math.max(count - 1, 0));
