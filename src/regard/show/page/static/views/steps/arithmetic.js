// One number of a step written out: the products and their sum, the exponential and its share, as regard.show.arithmetic writes them.

import { numeral } from "../../drawing/numerals.js";
import { isRoot, width } from "./attend.js";

const TERMS = 6; // of a sum, written out before the rest is counted

// The calculation of the number that a step has for query i and key j (of the context: number j), or "" where there is none.
export function written(name, problem, steps, i, j) {
  return WRITTEN[name]?.(problem, steps, i, j) ?? "";
}

const WRITTEN = {
  scores({ q, k, scores, weight }, steps, i, j) {
    if (weight) return bent(weight, q[i], k[j], steps.scores[i][j]);
    return scores || !q ? `${numeral(steps.scores[i][j])}, as it is given` : products(q[i], k[j], steps.scores[i][j]);
  },

  scaled(problem, { scores, scaled }, i, j) {
    const factor = isRoot(problem) ? `/ √${width(problem)}` : `· ${numeral(problem.scale)}`;
    return `${numeral(scores[i][j])} ${factor} = ${numeral(scaled[i][j])}`;
  },

  capped({ softcap }, { scaled, capped }, i, j) {
    return `${numeral(softcap)} · tanh(${numeral(scaled[i][j])} / ${numeral(softcap)}) = ${numeral(capped[i][j])}`;
  },

  masked(problem, { capped, masked }, i, j) {
    return became(capped[i][j], masked[i][j]);
  },

  weights({ sink, temperature = 1 }, { masked, weights }, i, j) {
    const row = (sink == null ? masked[i] : [...masked[i], sink]).map((score) => score / temperature);
    const top = Math.max(...row);
    if (top === -Infinity) return "0, for there is nothing to divide";
    const sum = row.reduce((total, score) => total + Math.exp(score - top), 0);
    const cooled = temperature === 1 ? numeral(masked[i][j]) : `${numeral(masked[i][j])} / ${numeral(temperature)}`;
    return `e^(${total([cooled, numeral(-top)])}) / ${numeral(sum)} = ${numeral(weights[i][j])}`;
  },

  dropped(problem, { weights, dropped }, i, j) {
    return became(weights[i][j], dropped[i][j]);
  },

  context({ v }, { dropped, context }, i, j) {
    const order = dropped[i].map((_, key) => key).filter((key) => dropped[i][key] !== 0);
    if (order.length > TERMS) order.sort((a, b) => dropped[i][b] - dropped[i][a]); // the largest are written out
    return products(order.map((key) => dropped[i][key]), order.map((key) => v[key][j]), context[i][j]);
  },
};

// a·b + c·d = result.
function products(a, b, result) {
  if (!a.length) return numeral(result);
  const terms = a.map((value, n) => `${within(value, n > 0)}·${within(b[n], true)}`);
  return `${total(terms, true)} = ${numeral(result)}`;
}

// w·tanh(a + b) + ... = result.
function bent(weight, a, b, result) {
  const terms = weight.map((w, n) => `${within(w, n > 0)}·tanh(${total([numeral(a[n]), numeral(b[n])])})`);
  return `${total(terms, true)} = ${numeral(result)}`;
}

// Terms joined by + and -, or by + alone; those past the first few are counted.
function total(terms, plus = false) {
  const few = terms.slice(0, TERMS);
  const rest = terms.length > few.length ? ` + ... (${terms.length - few.length} more)` : "";
  return few.reduce((sum, term) => (term.startsWith("-") && !plus ? `${sum} - ${term.slice(1)}` : `${sum} + ${term}`)) + rest;
}

function within(value, inside) {
  const text = numeral(value);
  return inside && text.startsWith("-") ? `(${text})` : text;
}

function became(before, after) {
  return before === after ? `${numeral(after)} (unchanged)` : `${numeral(before)} becomes ${numeral(after)}`;
}
