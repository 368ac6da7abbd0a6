// The scenes of Steps: each step of a problem with its formula, a sentence and its tables, for any setting of the switches.

import { formatThreeDigits } from "../../drawing/number_format.js";
import { attend, applySwitches } from "./attend.js";
import { makeEffectScene } from "./effect_scene.js";
import { listActiveSteps, writeFormulas, writeSentences } from "./narration.js";

const NAMES = ["scores", "scaled", "capped", "masked", "weights", "dropped", "context"];
const WIDE = 8; // maximum number of columns of a single row that is not transposed
const PROJECTED =
  "From its vector x, each token gets a query (what it looks for), a key (what it is found by) and a value (what it passes on). " +
  "Queries are compared with keys; the resulting weights combine the values into the context.";
const RECEIVED = " As the attention received them: with the bias, norm or rotation by position that a model may apply to these products.";
const COMPARED = "From its vector x, each token gets a query (what it looks for) and a key (what it is found by), which are compared.";
const ADDED =
  "x is the state of the decoder before it writes a token, y the outputs of the encoder for the tokens of the sentence. The score of " +
  "a query and a key is the dot product of the weight with tanh(q + k).";
const OFF = "This step is turned off: its numbers are those of the previous step.";

// Build the scenes of an answer to steps or example: {problem, own, steps, untouched, scenes}; `own` are the steps without
// switches. `effect` {quantity, values} is shown as one more step after the context.
export function buildScenes(data, switches, query, effect) {
  const told = (data.before ?? []).map(parseScene);
  const after = (data.after ?? []).map(parseScene);
  if (!data.rows.length) return { scenes: [...told, ...after] };
  const problem = applySwitches(data, switches);
  const own = attend(data);
  const steps = attend(problem);
  if (!data.before && data.q) told.push(listProjectedPanels(data));
  const untouched = problem.visible === data.visible && problem.scale === data.scale && problem.temperature === 1;
  const formula = { ...writeFormulas(steps, problem), ...(untouched ? data.formulas : data.formulas && selectKeptSteps(data.formulas)) };
  const said = { ...writeSentences(steps, data.rows, data.columns, query, data.places), ...(untouched && query === data.focus ? data.sentences : {}) };
  const wanted = new Set([...listActiveSteps(own), ...listActiveSteps(steps)]);
  const live = NAMES.filter((name) => wanted.has(name)).map((name) => ({
    name,
    formula: formula[name] ?? listInputTables(name, steps),
    sentence: said[name] ?? OFF,
    live: true,
    panels: [makeTable(name, steps, data)],
  }));
  if (!effect) return { problem, own, steps, untouched, scenes: [...told, ...live, ...after] };
  const last = makeEffectScene(effect, own, data, query);
  const panel = turnWide(last.shown, data.places, last.shown.values[0].map((value) => [effect.quantity.write(value)]));
  return { problem, own, steps, untouched, effect, scenes: [...told, ...live, ...after, { ...last, panels: [panel] }] };
}

// Parse a scene of the server; numbers that JSON does not have are sent as text.
function parseScene(scene) {
  const number = (value) => (typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value);
  const panels = scene.panels.map((one) => ({ ...one, values: one.values.map((row) => row.map(number)) }));
  return { ...scene, panels };
}

// Return the scene of q, k and v.
function listProjectedPanels({ q, k, v, weight, rows, columns }) {
  const kept = v ? "q, k, v" : "q, k";
  const named = [["query", "q", q, rows], ["key", "k", k, columns], ["value", "v", v, columns], ["weight", "w", weight && [weight], ["weight"]]].filter(([, , values]) => values);
  const panels = named.map(([title, letter, values, words]) => ({ title, rows: words, columns: numberWords(letter, values[0].length), axes: "words", values }));
  if (weight) return { name: `${kept}, weight`, formula: `x W_query, y W_key, ${v ? "y, " : ""}as it was trained`, sentence: ADDED, panels };
  return { name: kept, formula: v ? "x W_query, x W_key, x W_value" : "x W_query, x W_key", sentence: (v ? PROJECTED : COMPARED) + RECEIVED, panels };
}

function makeTable(name, steps, { rows, columns, places }) {
  const values = steps[name];
  if (name === "context") return { title: "", rows, columns: numberWords("c", values[0].length), axes: "words", values };
  const shares = name === "weights" || name === "dropped";
  const ends = shares ? [0, Math.max(...values.flat(), 1e-9)] : undefined;
  const hidden = shares ? (i, j) => steps.masked[i][j] === -Infinity : undefined;
  const texts = shares ? values[0].map((value) => [formatThreeDigits(value)]) : undefined; // most are too small for three decimal places
  return turnWide({ rows, columns, axes: "pairs", values, ends, hidden }, places, texts);
}

// Return the single row of a wide table as a column with its texts, so that its numbers fit.
function turnWide(panel, places, texts) {
  const { rows, columns, values, hidden } = panel;
  if (rows.length > 1 || columns.length <= WIDE) return { title: "", ...panel };
  const turned = hidden && ((i, j) => hidden(j, i));
  return { ...panel, title: "", rows: columns, columns: rows, values: values[0].map((value) => [value]), hidden: turned, upright: true, places, texts };
}

// Select the formulas of an example that are valid for any setting of the switches.
const selectKeptSteps = ({ scores, context }) => ({ ...(scores && { scores }), ...(context && { context }) });

// Return the name of the last active step before a step that is turned off.
function listInputTables(name, steps) {
  const names = listActiveSteps(steps).filter((one) => NAMES.indexOf(one) < NAMES.indexOf(name));
  return names.at(-1) ?? "scores";
}

const numberWords = (letter, count) => Array.from({ length: count }, (_, n) => `${letter}${n + 1}`);
