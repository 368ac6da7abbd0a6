// The difference of two matrices of weights: the words that they share, and the distance between their rows.

import { formatTokens } from "../../drawing/number_format.js";

const TILE = 256;
const MOST = 2 * TILE; // maximum pixels along a side of a picture

// Return the finest level of detail at which both fit in a picture; level 0 has every weight.
export function chooseLevel(...counts) {
  return Math.max(0, Math.ceil(Math.log2(Math.max(...counts) / MOST)));
}

// Fetch a whole level of a head as {weights, rows, columns}; fetch(query) returns a tile of codes, and decode(code) a number, null
// where it is hidden.
export async function fetchPicture({ queries, keys }, level, fetch, decode) {
  const [rows, columns] = [queries, keys].map((count) => Math.ceil(count / 2 ** level));
  const weights = new Array(rows * columns).fill(null);
  for (let row = 0; row * TILE < rows; row++) {
    for (let column = 0; column * TILE < columns; column++) {
      const { codes, shape } = await fetch({ level, row, column, how: "mean" });
      codes.forEach((code, n) => {
        weights[(row * TILE + Math.floor(n / shape[1])) * columns + column * TILE + (n % shape[1])] = decode(code);
      });
    }
  }
  return { weights, rows, columns };
}

// Return the rows and columns of a tile of a picture.
export const measureTile = ({ rows, columns }, { row, column }) => [Math.min(TILE, rows - row * TILE), Math.min(TILE, columns - column * TILE)];

// Return the part of two texts that can be compared, {rows, columns, said}: all, their common beginning, or nothing. What is said
// is about the keys, or about the queries if the keys are the same and the queries are not.
export function matchWords(a, b) {
  const axis = countDifferent(a.columns, b.columns) || !countDifferent(a.rows, b.rows) ? "columns" : "rows";
  const [first, second] = [a[axis], b[axis]];
  const differ = countDifferent(first, second);
  const whole = { rows: a.rows.length, columns: a.columns.length };
  if (!differ) return { ...whole, said: "" };
  if (a.rows.length === b.rows.length && a.columns.length === b.columns.length) {
    return { ...whole, said: `Both have ${formatTokens(first.length)}, ${differ} of which ${differ === 1 ? "is" : "are"} different: the difference is computed position by position.` };
  }
  const common = { rows: countCommonPrefix(a.rows, b.rows), columns: countCommonPrefix(a.columns, b.columns) };
  const lengths = `The first text has ${formatTokens(first.length)}, the second ${second.length}.`;
  if (Math.min(common.rows, common.columns) < 2) return { rows: 0, columns: 0, said: `${lengths} They have different beginnings, so there is no difference to show.` };
  return { ...common, said: `${lengths} The first ${common[axis]} are the same; the difference is computed for these.` };
}

// Count the words that are not the same at their position, those that only one text has among them.
const countDifferent = (a, b) => Array.from({ length: Math.max(a.length, b.length) }, (_, n) => a[n] !== b[n]).filter(Boolean).length;

function countCommonPrefix(a, b) {
  const count = Math.min(a.length, b.length);
  for (let n = 0; n < count; n++) if (a[n] !== b[n]) return n;
  return count;
}

// Return b - a over their common part, {weights, rows, columns}, at a level of detail.
export function subtractWeights(a, b, common, level) {
  const [rows, columns] = [common.rows, common.columns].map((count, n) => {
    const whole = count === [a.of.rows, a.of.columns][n] && count === [b.of.rows, b.of.columns][n];
    return whole ? Math.ceil(count / 2 ** level) : Math.floor(count / 2 ** level); // without a pixel that also covers other words
  });
  const weights = Array.from({ length: rows * columns }, (_, n) => {
    const [i, j] = [Math.floor(n / columns), n % columns];
    const [left, right] = [a, b].map((one) => one.weights[i * one.columns + j]);
    return left === null && right === null ? null : (right ?? 0) - (left ?? 0);
  });
  return { weights, rows, columns };
}

// Return the mean of ½ Σ |a - b| over the rows, from 0 (equal) to 1 (no overlap).
export function computeRowDistance({ weights, rows, columns }) {
  if (!rows) return null;
  let sum = 0;
  for (let i = 0; i < rows; i++) {
    let [apart, lack] = [0, 0];
    for (let j = 0; j < columns; j++) {
      const one = weights[i * columns + j] ?? 0;
      [apart, lack] = [apart + Math.abs(one), lack + one];
    }
    sum += (apart + Math.abs(lack)) / 2; // the difference of the row sums counts as one more key
  }
  return sum / rows;
}

// List the n numbers furthest from 0 as [row, column, number].
export function listFurthestCells({ weights, columns }, n) {
  const order = weights.map((_, place) => place).filter((place) => weights[place]);
  order.sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a]));
  return order.slice(0, n).map((place) => [Math.floor(place / columns), place % columns, weights[place]]);
}
