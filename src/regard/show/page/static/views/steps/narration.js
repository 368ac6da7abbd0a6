// Describe the steps of attention, with a formula and a sentence for each, as regard.show.step_descriptions does.

import { formatNumber, formatRounded } from "../../drawing/number_format.js";
import { formatPlainWord } from "../../drawing/words.js";
import { isScaledByRoot, getKeyWidth } from "./attend.js";

const NAMES = ["scores", "scaled", "capped", "masked", "weights", "dropped", "context"];
const ALWAYS = ["scores", "weights", "context"];
const LONGEST = 24; // maximum letters of a word in a sentence

// List the names of the steps that differ from the one before; scores, weights and context are always included if known.
export function listActiveSteps(steps) {
  const known = NAMES.filter((name) => steps[name] !== null);
  return known.filter((name, n) => ALWAYS.includes(name) || !areEqual(steps[known[n - 1]], steps[name]));
}

// Return the formula of each active step, in terms of the active step before it.
export function writeFormulas(steps, problem) {
  const found = {};
  let last = "scores";
  for (const name of listActiveSteps(steps)) {
    found[name] = writeFormula(name, last, steps, problem);
    last = name;
  }
  return found;
}

function writeFormula(name, last, steps, problem) {
  const cooled = (problem.temperature ?? 1) === 1 ? last : `${last} / ${formatNumber(problem.temperature)}`;
  const told = {
    scores: problem.weight ? "weightᵀ tanh(q + k)" : "q kᵀ",
    scaled: writeScale(problem),
    capped: "softcap tanh(scaled / softcap)",
    masked: last + describeMasking(steps),
    weights: `softmax(${cooled})`,
    dropped: "dropout(weights)",
    context: `${last} v`,
  };
  return told[name];
}

// Return the formula of scores times scale, as a division by √d where it is one.
function writeScale(problem) {
  return isScaledByRoot(problem) ? `scores / √${getKeyWidth(problem)}` : `scores · ${formatNumber(problem.scale)}`;
}

// Return the formula of bias and mask: the first where a score changed, the second where one was hidden.
function describeMasking({ capped, masked }) {
  const changed = masked.some((row, i) => row.some((score, j) => score !== -Infinity && score !== capped[i][j]));
  const hidden = masked.some((row) => row.includes(-Infinity));
  return (changed ? " + bias" : "") + (hidden ? ", -inf where a query may not see" : "");
}

// Describe what happened to one query at each step: one sentence per step, by its name. `places` are the positions of the
// columns if they are only some of the words: then the sentences are about these.
export function writeSentences(steps, rows, columns, query, places) {
  const asks = makeNamer(rows)(query);
  const name = makeNamer(columns, places);
  const told = {};
  for (const step of listActiveSteps(steps)) {
    const sentence = SAID[step](steps, query, asks, name, rows.length * columns.length);
    told[step] = places && step !== "context" ? `Of these ${columns.length} tokens, ${sentence[0].toLowerCase()}${sentence.slice(1)}` : sentence;
  }
  return told;
}

const SAID = {
  scores({ scores }, query, asks, name) {
    const row = scores[query];
    if (row.length === 1) return `${asks} is compared only with itself (${formatRounded(row[0])}).`;
    const [best, least] = [findGreatest(row), findSmallest(row)];
    if (row[best] === row[least]) return `${asks} matches every token equally (${formatRounded(row[best])}).`;
    return `${asks} matches ${name(best)} best (${formatRounded(row[best])}), ${name(least)} least (${formatRounded(row[least])}).`;
  },

  scaled({ scores, scaled }, query, asks) {
    const [before, after] = [scores, scaled].map((table) => Math.max(...table[query]) - Math.min(...table[query]));
    return (
      `The order of the scores is unchanged; the scores of ${asks} now differ by at most ${formatRounded(after)}, ` +
      `before by ${formatRounded(before)}.`
    );
  },

  capped({ scaled, capped }) {
    const [before, after] = [scaled, capped].map((table) => Math.max(...table.flat()));
    return `No score can exceed the cap: the largest, ${formatRounded(before)}, became ${formatRounded(after)}.`;
  },

  masked({ masked }, query, asks, name, pairs) {
    const seen = masked[query].filter((score) => score !== -Infinity).length;
    const hidden = masked.flat().filter((score) => score === -Infinity).length;
    return `${asks} may see ${seen} of ${masked[query].length} tokens; ${hidden} of ${pairs} pairs are hidden.`;
  },

  weights({ masked, weights }, query, asks, name) {
    const row = weights[query];
    const seen = row.map((_, j) => j).filter((j) => masked[query][j] !== -Infinity);
    if (row.some(Number.isNaN)) return `The weights of ${asks} are not numbers: its scores contain a NaN.`;
    if (!seen.length) return `${asks} may see nothing, so all its weights are 0.`;
    const best = findGreatest(row);
    const least = seen.reduce((a, b) => (row[b] < row[a] ? b : a));
    if (seen.length === 1) return `${asks} attends to ${name(best)} alone (${formatRounded(row[best])}).`;
    if (row[best] === row[least]) return `${asks} attends equally to the ${seen.length} tokens it sees (${formatRounded(row[best])} each).`;
    return `${asks} attends most to ${name(best, formatRounded(row[best]))}, least to ${name(least, formatRounded(row[least]))}.`;
  },

  dropped({ weights, dropped }, query, asks) {
    const held = weights.flat();
    const kept = dropped.flat();
    const grown = kept.map((value, n) => value / held[n]).filter((_, n) => kept[n] > 0);
    const fallen = held.filter((value, n) => value > 0 && !(kept[n] > 0)).length;
    const mean = grown.reduce((a, b) => a + b, 0) / grown.length;
    const rest = grown.length ? `, the others are ${formatRounded(mean)} times as large` : "";
    const own = [dropped, weights].map((table) => table[query].filter((value) => value > 0).length);
    return (
      `${fallen} of ${held.filter((value) => value > 0).length} weights were set to 0${rest}; ` +
      `${asks} keeps ${own[0]} of ${own[1]}.`
    );
  },

  context({ dropped, context }, query, asks, name) {
    const row = dropped[query];
    const order = row.map((_, j) => j).filter((j) => row[j] > 0);
    order.sort((a, b) => row[b] - row[a]);
    if (!order.length) return `${asks} attends to nothing: its new vector is 0.`;
    const mixed = order.slice(0, 3).map((j) => `${formatRounded(row[j])} ${name(j)}`).join(" + ") + (order.length > 3 ? " + ..." : "");
    const vector = context[query].slice(0, 4).map(formatRounded).join(", ") + (context[query].length > 4 ? ", ..." : "");
    return `${asks} becomes ${mixed} = (${vector}).`;
  },
};

// Return a function that quotes the word at an index; its position, where it occurs more than once, and notes follow.
export function makeNamer(words, places) {
  const bare = words.map((word) => formatPlainWord(word.trim() || word, LONGEST));
  const count = new Map();
  for (const word of bare) count.set(word, (count.get(word) ?? 0) + 1);
  return (index, ...notes) => {
    const inside = count.get(bare[index]) === 1 ? notes : [`token ${places?.[index] ?? index}`, ...notes];
    return `‘${bare[index]}’${inside.length ? ` (${inside.join(", ")})` : ""}`;
  };
}

function findGreatest(row) {
  return row.reduce((best, value, j) => (value > row[best] ? j : best), 0);
}

function findSmallest(row) {
  return row.reduce((least, value, j) => (value < row[least] ? j : least), 0);
}

function areEqual(a, b) {
  return a.length === b.length && a.every((row, i) => row.every((value, j) => Object.is(value, b[i][j]) || value === b[i][j]));
}
