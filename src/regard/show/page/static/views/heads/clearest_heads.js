// The clearest heads: what each does, in a sentence with its score and the number of words that support it.

import { el } from "../../drawing/elements.js";

const MOST = 5;
const OTHERS = ["local", "broad"]; // these only fill up

// Select at most five heads of a clear kind: the clearest of each telling kind, then the next of each, then others; by the lower
// limit of the score. `telling` are kinds, the most telling first.
export function selectClearestHeads(rows, telling) {
  return [...takeTurns(rows, telling), ...takeTurns(rows, OTHERS)].slice(0, MOST);
}

// Order the heads of some kinds: the clearest of each kind, then the next of each.
function takeTurns(rows, kinds) {
  const byKind = kinds.map((kind) => rows.filter((row) => row.kind === kind && row.verdict).sort((a, b) => b.verdict.low - a.verdict.low));
  const longest = Math.max(...byKind.map((some) => some.length));
  return Array.from({ length: longest }, (_, n) => byKind.map((some) => some[n])).flat().filter(Boolean);
}

// Render a card for each of these heads, which the kinds `telling` order; place(row) returns its layer and head in the recording.
export function renderClearestHeads(app, rows, telling, place) {
  const found = selectClearestHeads(rows, telling);
  if (!found.length) return [el("p", { class: "note" }, app.inUnits("On these tokens no head has a clear kind: the scores are below their thresholds, or too few tokens count."))];
  const link = (row, view) => app.link({ view, ...place(row), heads: null, x: null, y: null, zoom: null });
  const card = (row) => el("li", {},
    el("h3", { class: "numbers" }, `Head ${row.head} of layer ${row.layer} · ${row.kind}`),
    el("p", {}, `${row.sentence[0].toUpperCase()}${row.sentence.slice(1)}.`),
    el("p", { class: "clearest-links" }, ["map", "text"].map((view) => el("a", { href: link(row, view), "aria-label": `Head ${row.head} of layer ${row.layer} in ${view === "map" ? "Map" : "Text"}` }, view === "map" ? "Map" : "Text"))));
  return [el("h2", {}, found.length === 1 ? "The clearest head" : `The ${found.length} clearest heads`),
    el("p", { class: "note" }, app.inUnits("Each score is the mean over the tokens that count, its queries, with its 95 % interval; 1 is the most.")), el("ul", {}, found.map(card))];
}
