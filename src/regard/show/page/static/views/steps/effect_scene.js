// The step after the context that the switch selects: how much each key writes to the query, moves the next word, or would if it
// were hidden.

import { shadeSigned, shadeWeight } from "../../drawing/color.js";
import { formatNumber, formatThreeDigits } from "../../drawing/number_format.js";
import { makeNamer } from "./narration.js";

const FORMULAS = {
  carried: "weights · ‖v W_O‖",
  pull: "weights · ∂logit / ∂weights",
  cut: "−weights / (1 − weights) · ∂logit / ∂context · (v − context)",
};

// Fetch the numbers of a setting as rows of queries, 0 where a key is hidden; of a long text, of one query and the listed keys.
export async function fetchEffect(app, { summary, place, asked, data, query }, signal) {
  const { codes } = await app.source.attribution(summary.id, { ...place, ...asked, ...(data.partial ? { q: query } : { level: 0, row: 0, column: 0, how: "mean" }) }, signal);
  const numbers = Array.from(codes, (value) => (Number.isNaN(value) ? 0 : value));
  if (data.partial) return [data.places.map((key) => numbers[key])];
  return data.rows.map((_, i) => numbers.slice(i * data.columns.length, (i + 1) * data.columns.length));
}

// Return the scene of an effect {quantity, values}, with a sentence on a query; `own` are the steps without switches.
export function makeEffectScene({ quantity, values }, own, data, query) {
  const high = Math.max(...values.flat().map(Math.abs), 1e-9);
  const isHidden = (i, j) => own.masked[i][j] === -Infinity;
  const colours = quantity.isSigned ? { ends: [-high, high], shade: (share) => shadeSigned(2 * share - 1) } : { ends: [0, high], shade: shadeWeight };
  return {
    name: quantity.name,
    formula: FORMULAS[quantity.name],
    sentence: describeEffect(quantity, values[query], own.masked[query], makeNamer(data.rows)(query), makeNamer(data.columns, data.places)) + describeOtherRows(values, query),
    live: true,
    effect: true,
    shown: { rows: data.rows, columns: data.columns, axes: "pairs", values, hidden: isHidden, ...colours },
    write: (i, j) => (isHidden(i, j) ? "0, because the key is hidden" : writeFactors(quantity.name, own.weights[i][j], values[i][j])),
  };
}

// Write a number as the weight and the factor that it comes from.
function writeFactors(name, weight, value) {
  if (!weight) return `${formatNumber(value)}, because the weight is 0`;
  if (name !== "cut") return `${formatNumber(weight)} · ${bracket(value / weight)} = ${formatNumber(value)}`;
  if (weight === 1) return `${formatNumber(value)}, because no other key is left`;
  return `-${formatNumber(weight)} / (1 - ${formatNumber(weight)}) · ${bracket((-value * (1 - weight)) / weight)} = ${formatNumber(value)}`;
}

const bracket = (value) => (value < 0 ? `(${formatNumber(value)})` : formatNumber(value));

// Say of an effect that only one query has that this is so; in the last layer it is the one whose next word is predicted.
function describeOtherRows(values, query) {
  const hasEffect = values.map((row) => row.some((value) => value !== 0));
  const isOnlyOne = hasEffect[query] && hasEffect.filter(Boolean).length === 1 && values.length > 1;
  return isOnlyOne ? " All other rows are 0: from this layer, no other token reaches the logit." : "";
}

function describeEffect({ name, of, write }, row, masked, asks, nameKey) {
  const seen = row.map((_, j) => j).filter((j) => masked[j] !== -Infinity);
  const [least, most] = [Math.min, Math.max].map((choose) => seen.find((j) => row[j] === choose(...seen.map((key) => row[key]))));
  if (name === "carried") return `Each key writes its value, after the output projection, into the new vector of ${asks}: this is the length of what it writes. Most comes from ${nameKey(most)} (${formatThreeDigits(row[most])}).`;
  const ends = [row[most] > 0 && `${nameKey(most)} raises it most (${write(row[most])})`, row[least] < 0 && `${nameKey(least)} lowers it most (${write(row[least])})`].filter(Boolean);
  const told = ends.length ? `${name === "cut" ? "Hiding " : ""}${ends.join(name === "cut" ? ", hiding " : ", ")}.` : `For ${asks} all are 0: this layer’s attention from that token does not reach the logit.`;
  if (name === "pull") return `The weight times how fast ${of} grows with it: how much this weight moves ${of}. ${ends.length ? `For ${asks}: ` : ""}${told}`;
  return `By how much ${of} changes, to first order, if ${asks} cannot see a key and its other weights grow to add up to 1. ${told}`;
}
