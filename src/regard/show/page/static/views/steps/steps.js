// Steps: the computation of one head as the lectures draw it, a step at a time, with its numbers and switches.

import { headOf } from "../../frame/bar.js";
import { written } from "./arithmetic.js";
import { names } from "./narration.js";
import { panelsSvg, tabbed } from "./panel.js";
import { naming, story } from "./scenes.js";
import { heading, skeleton } from "./skeleton.js";
import { settings, switches, UNTOUCHED } from "./switches.js";

export const view = {
  name: "steps",
  title: "Steps",
  question: "How does a number come about?",
  bar: (state) => (state.r && !state.example ? ["attention", "batch", "layer", "head"] : []),
  mount,
};

// `it` is what the functions below share: the page and its switches, the answer that is loaded, the story told of it, and
// where one stands: the scene, the query, the key, and the number of the context.
function mount(stage, app) {
  const it = { app, loaded: { key: null, data: null }, told: null, at: { row: 0, column: 0, number: 0 }, asking: null };
  it.page = skeleton(app, (by) => move(it, by), (step) => app.go({ step }, { replace: true }));
  it.switched = switches((changes) => app.go(changes, { replace: true }));
  it.page.side.prepend(it.switched.element);
  it.page.onCopy(() => copy(it));
  stage.classList.add("steps");
  stage.append(it.page.root);
  return { draw: (state) => draw(it, state), leave: () => it.asking?.abort(), keys: keysOf(it), picture: () => picture(it) };
}

// The example that a state shows in place of a recording, or null; and what its query and key are called in the link.
const chosen = ({ app }, state) => state.example ?? (app.summary() ? null : "simple");
const axes = (it, state) => (chosen(it, state) ? ["row", "column"] : ["q", "k"]);

async function draw(it, state) {
  it.page.pick(chosen(it, state));
  const key = keyOf(it, state);
  if (key !== it.loaded.key) {
    await load(it, state, key);
    state = it.app.state();
  }
  render(it, state);
}

// What an answer is of: a long text is answered a query at a time.
function keyOf(it, state) {
  const { app } = it;
  const example = chosen(it, state);
  if (example) return `${example} ${state.head}`;
  const { queries, keys } = app.attention().layers[state.layer];
  const long = Math.max(queries, keys) > app.start.limits.steps;
  return JSON.stringify([state.r, app.place(), long ? (state.q ?? null) : null]);
}

async function load(it, state, key) {
  const { app } = it;
  const example = chosen(it, state);
  it.asking?.abort();
  const { signal } = (it.asking = new AbortController());
  app.wait("Fetching the steps");
  const asked = example ? app.source.example({ name: example, head: state.head }, signal) : app.source.steps(state.r, { ...app.place(), q: state.q }, signal);
  it.loaded = { key, data: await asked };
  app.ready();
}

function render(it, state) {
  const { app, page, at } = it;
  const { data } = it.loaded;
  stand(it, state);
  page.head(data, (head) => app.go({ head }));
  page.steps(it.told.scenes.map((scene) => scene.name), at.scene);
  it.switched.draw(data, state);
  page.bars(it.told, data, at, (column) => select(it, at.row, column), (row) => select(it, row));
  scene(it);
  caption(it, state);
}

// Tells the story of the query that a state names, and stands at the step and the key that it names: the key that the query
// looks at most where it names none.
function stand(it, state) {
  const { at } = it;
  const { data } = it.loaded;
  const [row, column] = axes(it, state).map((name) => state[name]);
  at.row = data.partial || row === undefined ? first(it, state) : clamp(Number(row), data.rows.length);
  it.told = story(data, settings(state), at.row);
  const weights = it.told.own?.weights[at.row] ?? [];
  const most = weights.indexOf(Math.max(...weights));
  at.column = column === undefined ? most : clamp(Number(data.partial ? data.places.indexOf(Number(column)) : column), data.columns.length);
  const names = it.told.scenes.map((one) => one.name);
  at.scene = Math.max(names.indexOf(names.includes(state.step) ? state.step : data.before ? names[0] : "scores"), 0);
}

// The query of a state that names none: the last, or of a translation, whose last one is its end, the word before.
function first({ app, loaded: { data }, ...it }, state) {
  if (data.partial || chosen({ app, ...it }, state) || !app.ofTwoTexts()) return data.focus;
  return app.telling(app.attention().rows, Math.max(data.rows.length - 2, 0));
}

const sceneOf = (it) => it.told.scenes[it.at.scene];
const ofContext = (it) => sceneOf(it).name === "context";

function scene(it) {
  it.page.scene(sceneOf(it), it.at, sceneOf(it).live ? { pick: (...place) => pick(it, ...place) } : {});
  arithmetic(it, it.at.row, ofContext(it) ? it.at.number : it.at.column);
}

// How the number under the pointer, or the one that is picked, comes about.
function arithmetic(it, row, column) {
  const now = sceneOf(it);
  const { data } = it.loaded;
  if (!now.live || column < 0) return it.page.sum("");
  const asks = names(data.rows, { quoted: !data.before })(row);
  const of = ofContext(it) ? `number ${column + 1} of ${asks}` : `${asks} → ${names(data.columns, naming(data))(column)}`;
  return it.page.sum(of, written(now.name, it.told.problem, it.told.steps, row, column), it.told.steps[now.name][row][column]);
}

// The pointer is on a cell of the table, or on none; or it has pressed one, or the word of a row.
function pick(it, first, second, hovering = false) {
  const { at } = it;
  const [row, column] = sceneOf(it).panels[0].upright && first !== null ? [at.row, first] : [first, second];
  if (hovering && row === null) return arithmetic(it, at.row, ofContext(it) ? at.number : at.column);
  if (hovering) return arithmetic(it, row, column);
  if (ofContext(it) && column !== null) at.number = column;
  else if (column !== null) return select(it, row, column);
  return select(it, row);
}

// Makes a query, and a key where one is named, those of the link.
function select(it, row, column) {
  const [rows, columns] = axes(it, it.app.state());
  const { data } = it.loaded;
  const changes = data.partial ? {} : { [rows]: row };
  if (column !== undefined) changes[columns] = data.partial ? data.places[column] : column;
  it.app.go(changes, { replace: true });
}

function move(it, by) {
  if (!it.told) return;
  const next = clamp(it.at.scene + by, it.told.scenes.length);
  it.app.go({ step: it.told.scenes[next].name }, { replace: true });
}

// The next query or the one before; of a long text another row is asked for.
function turn(it, by) {
  const { app, at } = it;
  if (!it.told?.own) return;
  if (!it.loaded.data.partial) return select(it, clamp(at.row + by, it.loaded.data.rows.length));
  const count = app.attention().layers[app.state().layer].queries;
  app.go({ q: clamp((app.state().q ?? count - 1) + by, count) }, { replace: true });
}

function across(it, by) {
  if (it.told?.own) select(it, it.at.row, clamp(it.at.column + by, it.loaded.data.columns.length));
}

function caption(it, state) {
  const { app } = it;
  const { data } = it.loaded;
  const ofExample = () => [app.el("b", {}, data.title), data.source ? `, ${data.source}` : ""];
  const ofHead = () => [app.el("b", {}, `Layer ${state.layer}, head ${headOf(app, state)}`), ` of ${app.summary().model}`];
  const axes = data.partial ? ": a row for each key, the column is the query." : data.rows.length ? ": a row is a word that looks (a query), a column one it looks at (a key)." : ".";
  app.caption(...(chosen(it, state) ? ofExample() : ofHead()), axes);
}

function copy(it) {
  const now = it.told && sceneOf(it);
  if (!now?.panels.length) return;
  const text = now.panels.map(tabbed).join("\n\n");
  navigator.clipboard?.writeText(text).then(() => it.page.copied(), () => it.page.copied("The browser does not allow it."));
}

const keysOf = (it) => [
  ["ArrowRight", "the next step; with Shift the next key", (event) => (event.shiftKey ? across(it, 1) : move(it, 1))],
  ["ArrowLeft", "the step before; with Shift the key before", (event) => (event.shiftKey ? across(it, -1) : move(it, -1))],
  ["ArrowDown", "the next query", () => turn(it, 1)],
  ["ArrowUp", "the query before", () => turn(it, -1)],
  ["c", "copy the numbers, every digit", () => copy(it)],
  ["Escape", "as the head does it, nothing picked", () => it.app.go({ ...UNTOUCHED, q: null, k: null, row: null, column: null }, { replace: true })],
];

const picture = (it) => it.told && { svg: panelsSvg(`${it.loaded.data.title}: ${heading(sceneOf(it))}`, sceneOf(it).panels) };

const clamp = (value, count) => Math.min(Math.max(Math.trunc(value) || 0, 0), Math.max(count - 1, 0));
