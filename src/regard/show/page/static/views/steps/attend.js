// softmax(q kᵀ · scale) v on small arrays with all intermediate steps, as regard.attend computes it, for the view Steps.

// Compute every step of a problem {q, k, v, scores, scale, softcap, bias, sink, visible, hidden, temperature, dropout}, arrays
// of rows. The scores are q kᵀ unless they are given; without v there is no context. A hidden entry has the score `hidden`,
// -Infinity except in the example of a wrong mask; dropout contains the factor of each weight.
export function attend({ q, k, v, scores, scale = 1, softcap, bias, sink, visible, hidden, temperature = 1, dropout }) {
  const raw = scores ?? multiplyMatrices(q, k);
  const scaled = scale === 1 ? raw : mapTable(raw, (score) => score * scale);
  const capped = softcap == null ? scaled : mapTable(scaled, (score) => softcap * Math.tanh(score / softcap));
  const biased = bias == null ? capped : mapTable(capped, (score, i, j) => score + bias[i][j]);
  const masked = visible == null ? biased : mapTable(biased, (score, i, j) => (visible[i][j] ? score : (hidden ?? -Infinity)));
  const weights = masked.map((row) => softmax(row, sink, temperature));
  const dropped = dropout == null ? weights : mapTable(weights, (weight, i, j) => weight * dropout[i][j]);
  const context = v == null ? null : multiplyMatrices(dropped, transpose(v));
  return { scores: raw, scaled, capped, masked, weights, dropped, context };
}

// Return exp(s / T) / Σ exp(s / T); a sink is one more score in the sum. A fully masked row has weights 0.
export function softmax(row, sink = null, temperature = 1) {
  const all = (sink == null ? row : [...row, sink]).map((score) => score / temperature);
  const top = all.reduce((a, b) => (b > a || Number.isNaN(b) ? b : a), -Infinity);
  if (top === -Infinity) return row.map(() => 0);
  const raised = all.map((score) => Math.exp(score - top)); // no exponent above 0
  const sum = raised.reduce((a, b) => a + b, 0);
  return raised.slice(0, row.length).map((part) => part / sum);
}

// Return a bᵀ.
export function multiplyMatrices(a, b) {
  return a.map((x) => b.map((y) => x.reduce((sum, value, n) => sum + value * y[n], 0)));
}

// Return the transpose of an array of rows.
export function transpose(rows) {
  return rows[0].map((_, j) => rows.map((row) => row[j]));
}

// Return a table of change(value, row, column) for every number of a table.
export function mapTable(table, change) {
  return table.map((row, i) => row.map((value, j) => change(value, i, j)));
}

// Return a problem with its switches set: mask "own", "causal" or "none"; root (√d) true, false, or null for its own.
export function applySwitches(problem, { mask = "own", root = null, temperature = 1 }) {
  const scale = root === null ? problem.scale : root ? getKeyWidth(problem) ** -0.5 : 1;
  if (mask === "own") return { ...problem, scale, temperature };
  const sees = mask === "causal" ? (i, j) => j <= i + getOffset(problem) : () => true;
  return { ...problem, visible: buildVisibleTable(problem, sees), hidden: null, scale, temperature };
}

// Return whether the mask of a problem is causal.
export function isCausal(problem) {
  if (problem.visible == null || problem.hidden != null) return false;
  return problem.visible.every((row, i) => row.every((seen, j) => seen === (j <= i + getOffset(problem))));
}

// Return whether nothing is masked.
export function isOpen(problem) {
  return problem.visible == null || problem.visible.every((row) => row.every(Boolean));
}

// Return the position of the first query among the keys; the last query is at the last key.
export function getOffset(problem) {
  const [queries, keys] = getSize(problem);
  return keys - queries;
}

// Return the number of queries and of keys.
export function getSize({ q, k, scores }) {
  return scores ? [scores.length, scores[0].length] : [q.length, k.length];
}

// Return d, the width of a query, computed from the scale if the query is not known.
export function getKeyWidth({ q, scale }) {
  return q ? q[0].length : Math.round(scale ** -2);
}

// Return whether the scale is 1 / √d.
export function isScaledByRoot({ q, scale }) {
  const d = q ? q[0].length : Math.round(scale ** -2);
  return d > 0 && Math.abs(scale * Math.sqrt(d) - 1) < 1e-6;
}

function buildVisibleTable(problem, seen) {
  const [queries, keys] = getSize(problem);
  return Array.from({ length: queries }, (_, i) => Array.from({ length: keys }, (_, j) => seen(i, j)));
}
