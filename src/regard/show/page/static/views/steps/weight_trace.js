// How one weight came about, in linked pictures: its row of q, its row of k, their products, the score, its place in the softmax,
// and what it adds to the context.

import { el, svg } from "../../drawing/elements.js";
import { formatCount, formatThreeDigits } from "../../drawing/number_format.js";

const HEIGHT = 100; // units of a strip of bars
const FULL = 96; // units of its longest bar

// Return the numbers of query i and key j: the rows of q and k with their products, which add up to the score; the row of weights
// that the weight is part of; the value, what the weight adds to the context, and the context. What is not known is null.
export function computeTrace({ q, k, v, weight }, steps, i, j) {
  const terms = q && k && (weight ? (n) => weight[n] * Math.tanh(q[i][n] + k[j][n]) : (n) => q[i][n] * k[j][n]);
  const share = steps.dropped[i][j];
  return {
    q: q?.[i] ?? null,
    k: k?.[j] ?? null,
    products: terms ? q[i].map((_, n) => terms(n)) : null,
    weights: steps.dropped[i],
    value: v?.[j] ?? null,
    added: v ? v[j].map((number) => share * number) : null,
    context: steps.context?.[i] ?? null,
  };
}

// Create the pictures; draw({problem, steps, query, nameKey}, i, j) shows those of query i, a word, and key j, named by nameKey(j).
export function createTrace() {
  const element = el("section", { class: "trace", "aria-label": "How this weight came about" });
  let strips = [];

  function draw({ problem, steps, query, nameKey }, i, j) {
    const [found, key] = [computeTrace(problem, steps, i, j), nameKey(j)];
    strips = listStrips(found, { problem, steps, query, key, nameKey }, i, j).filter(({ values }) => values).map(createStrip);
    element.replaceChildren(el("h2", {}, `${query} → ${key}`), ...joinSections(strips, writeScore(steps, i, j)));
  }

  const point = (event) => {
    const strip = strips.find((one) => one.element.contains(event.target));
    const { left, width } = (strip ?? strips[0])?.bars.getBoundingClientRect() ?? {};
    const n = strip && Math.floor(((event.clientX - left) / width) * strip.values.length);
    for (const one of strips) one.mark(strip && one.group === strip.group && n >= 0 && n < one.values.length ? n : null);
  };
  element.addEventListener("pointermove", point);
  element.addEventListener("pointerdown", point);
  element.addEventListener("pointerleave", () => strips.forEach((one) => one.mark(null)));
  return { element, draw };
}

// List the strips in the order of the computation; strips of a group have the same axis.
function listStrips(found, { problem, steps, query, key, nameKey }, i, j) {
  const hidden = steps.masked[i][j] === -Infinity;
  const product = problem.weight ? "weight · tanh(q + k), number by number" : "q · k, number by number";
  return [
    { name: "q", group: "width", title: `q of ${query}`, values: found.q },
    { name: "k", group: "width", title: `k of ${key}`, values: found.k },
    { name: "products", group: "width", title: product, values: found.products },
    { name: "weights", group: "keys", title: `${problem.partial ? `the ${found.weights.length} largest` : "all"} weights of ${query}`, values: found.weights, lit: j, nameBar: nameKey, seen: steps.masked[i].map((score) => score !== -Infinity) },
    { name: "value", group: "value", title: `v of ${key}`, values: found.value },
    { name: "added", group: "value", title: hidden ? "hidden: nothing is added to the context" : "weight · v, in the context (outlined)", values: found.added, behind: found.context },
  ];
}

// Put the line of scores after the products, before the softmax.
function joinSections(strips, score) {
  const softmax = strips.findIndex(({ group }) => group === "keys");
  return [...strips.slice(0, softmax), { element: score }, ...strips.slice(softmax)].map((one) => one.element);
}

// Write the score from step to step: "3.21 scores → 0.401 scaled → 0.62 weight".
function writeScore(steps, i, j) {
  const names = ["scores", "scaled", "capped", "masked", "weights", "dropped"];
  const values = names.map((name) => steps[name][i][j]);
  const changed = names.map((name, n) => [name, values[n]]).filter(([name, value], n) => n === 0 || name === "weights" || value !== values[n - 1]);
  return el("p", { class: "trace-score numbers" }, changed.map(([name, value], n) => [n ? " → " : "= ", el("span", { class: "note" }, `${name.replace(/s$/, "")} `), el("b", { title: String(value) }, formatThreeDigits(value))]));
}

// Create a strip of bars, up for what is above 0 and down for what is below; `lit` marks a bar, `behind` are outlines.
function createStrip({ name, group, title, values, lit = null, behind, nameBar, seen }) {
  const all = [...values, ...(behind ?? [])].map(Math.abs).filter(Number.isFinite);
  const top = Math.max(...all, 0) || 1;
  const low = all.length && [...values, ...(behind ?? [])].some((value) => value < 0);
  const zero = low ? HEIGHT / 2 : HEIGHT;
  const length = (value) => ((Number.isFinite(value) ? value : 0) / top) * (low ? FULL / 2 : FULL);
  const bar = (kind) => (value, n) => {
    const size = length(value);
    return svg("rect", { class: kind(value, n), x: n + 0.08, width: 0.84, y: zero - Math.max(size, 0), height: Math.abs(size) });
  };
  const mark = svg("rect", { class: "trace-mark", x: 0, width: 1, y: 0, height: HEIGHT, visibility: "hidden" });
  const bars = svg("svg", { viewBox: `0 0 ${values.length} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${formatCount(values.length)} numbers, the largest ${formatThreeDigits(top)}` },
    lit !== null && svg("rect", { class: "trace-place", x: lit, width: 1, y: 0, height: HEIGHT }),
    mark,
    (behind ?? []).map(bar(() => "trace-behind")),
    values.map(bar((value, n) => (n === lit ? "trace-lit" : nameBar ? "trace-share" : value < 0 ? "trace-lowers" : "trace-raises"))),
    svg("line", { class: "trace-zero", x1: 0, x2: values.length, y1: zero, y2: zero }));
  const said = el("span", { class: "numbers" });
  const tell = (n) => (said.textContent = n === null ? (lit === null ? `${low ? "±" : "up to "}${formatThreeDigits(top)}` : describeRank(values, lit, seen)) : `${nameBar ? nameBar(n) : n + 1}: ${formatThreeDigits(values[n])}${behind ? ` of ${formatThreeDigits(behind[n])}` : ""}`);
  tell(null);
  const element = el("figure", { class: "trace-strip", "data-strip": name }, el("figcaption", {}, el("span", {}, title), said), bars);
  return {
    element, bars, values, group,
    mark(n) {
      mark.setAttribute("visibility", n === null ? "hidden" : "visible");
      mark.setAttribute("x", n ?? 0);
      tell(n);
    },
  };
}

// Describe a weight by its rank among those of the keys that are seen.
function describeRank(weights, j, seen) {
  if (!seen[j]) return "hidden";
  const rank = 1 + weights.filter((weight) => weight > weights[j]).length;
  return `${formatThreeDigits(weights[j])}, ${rank === 1 ? "the largest" : `${formatCount(rank)}${rank % 100 > 10 && rank % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][rank % 10] ?? "th"}`} of ${formatCount(seen.filter(Boolean).length)}`;
}
