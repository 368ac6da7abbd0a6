// Write out the calculation of one number of a step, as regard.show.arithmetic does.

import { formatNumber } from "../../drawing/number_format.js";
import { isScaledByRoot, getKeyWidth } from "./attend.js";

const TERMS = 6; // maximum number of terms of a sum that are written out

// Return the calculation of a step's number for query i and key j (for the context: number j), or "" if there is none.
export function writeArithmetic(name, problem, steps, i, j) {
  return WRITTEN[name]?.(problem, steps, i, j) ?? "";
}

const WRITTEN = {
  scores({ q, k, scores, weight }, steps, i, j) {
    if (weight) return writeTanhTerms(weight, q[i], k[j], steps.scores[i][j]);
    return scores || !q ? `${formatNumber(steps.scores[i][j])} (given)` : writeProducts(q[i], k[j], steps.scores[i][j]);
  },

  scaled(problem, { scores, scaled }, i, j) {
    const factor = isScaledByRoot(problem) ? `/ √${getKeyWidth(problem)}` : `· ${formatNumber(problem.scale)}`;
    return `${formatNumber(scores[i][j])} ${factor} = ${formatNumber(scaled[i][j])}`;
  },

  capped({ softcap }, { scaled, capped }, i, j) {
    return `${formatNumber(softcap)} · tanh(${formatNumber(scaled[i][j])} / ${formatNumber(softcap)}) = ${formatNumber(capped[i][j])}`;
  },

  masked(problem, { capped, masked }, i, j) {
    return describeChange(capped[i][j], masked[i][j]);
  },

  weights({ sink, temperature = 1 }, { masked, weights }, i, j) {
    const row = (sink == null ? masked[i] : [...masked[i], sink]).map((score) => score / temperature);
    const top = Math.max(...row);
    if (top === -Infinity) return "0, because all scores are -inf";
    const sum = row.reduce((total, score) => total + Math.exp(score - top), 0);
    const cooled = temperature === 1 ? formatNumber(masked[i][j]) : `${formatNumber(masked[i][j])} / ${formatNumber(temperature)}`;
    return `e^(${writeTotal([cooled, formatNumber(-top)])}) / ${formatNumber(sum)} = ${formatNumber(weights[i][j])}`;
  },

  dropped(problem, { weights, dropped }, i, j) {
    return describeChange(weights[i][j], dropped[i][j]);
  },

  context({ v }, { dropped, context }, i, j) {
    const order = dropped[i].map((_, key) => key).filter((key) => dropped[i][key] !== 0);
    if (order.length > TERMS) order.sort((a, b) => dropped[i][b] - dropped[i][a]); // the largest terms come first
    return writeProducts(order.map((key) => dropped[i][key]), order.map((key) => v[key][j]), context[i][j]);
  },
};

// Write a·b + c·d = result.
function writeProducts(a, b, result) {
  if (!a.length) return formatNumber(result);
  const terms = a.map((value, n) => `${substituteTerm(value, n > 0)}·${substituteTerm(b[n], true)}`);
  return `${writeTotal(terms, true)} = ${formatNumber(result)}`;
}

// Write w·tanh(a + b) + ... = result.
function writeTanhTerms(weight, a, b, result) {
  const terms = weight.map((w, n) => `${substituteTerm(w, n > 0)}·tanh(${writeTotal([formatNumber(a[n]), formatNumber(b[n])])})`);
  return `${writeTotal(terms, true)} = ${formatNumber(result)}`;
}

// Join terms by + and -, or by + alone; terms after the first few are only counted.
function writeTotal(terms, plus = false) {
  const few = terms.slice(0, TERMS);
  const rest = terms.length > few.length ? ` + ... (${terms.length - few.length} more)` : "";
  return few.reduce((sum, term) => (term.startsWith("-") && !plus ? `${sum} - ${term.slice(1)}` : `${sum} + ${term}`)) + rest;
}

function substituteTerm(value, inside) {
  const text = formatNumber(value);
  return inside && text.startsWith("-") ? `(${text})` : text;
}

function describeChange(before, after) {
  return before === after ? `${formatNumber(after)} (unchanged)` : `${formatNumber(before)} becomes ${formatNumber(after)}`;
}
