// The weights of a query as bars.

import { formatColor, shadeWeight } from "../../drawing/color.js";
import { el } from "../../drawing/elements.js";
import { formatCount, formatThreeDigits } from "../../drawing/number_format.js";
import { quoteWord, renderWord } from "../../drawing/words.js";
import { makeNamer } from "./narration.js";

const BARS = 16; // maximum number of words listed

// Render the bars; if a switch is set, a mark shows the original weight of the head.
export function renderBars(told, data, at, pickColumn, pickRow) {
  const [now, own] = [told.steps.weights[at.row], told.own.weights[at.row]];
  const all = now.map((_, j) => j);
  const listed = all.length > BARS ? all.sort((a, b) => now[b] - now[a]).slice(0, BARS).sort((a, b) => a - b) : all;
  const top = Math.max(...now, ...own, 1e-9);
  const rows = listed.map((j) =>
    el("button", { class: data.places ? "steps-bar steps-placed quiet" : "steps-bar quiet", "aria-pressed": String(j === at.column), onclick: () => pickColumn(j) },
      el("span", { class: "steps-word" }, data.places && el("span", { class: "note numbers" }, formatCount(data.places[j]), " "), renderWord(data.columns[j])),
      el("span", { class: "steps-track" },
        el("span", { class: "steps-fill", style: { width: `${(100 * now[j]) / top}%`, backgroundColor: formatColor(shadeWeight(0.25 + (0.75 * now[j]) / top)) } }),
        told.untouched ? null : el("span", { class: "steps-was", style: { left: `${(100 * own[j]) / top}%` }, title: `original: ${formatThreeDigits(own[j])}` })),
      el("span", { class: "numbers" }, told.steps.masked[at.row][j] === -Infinity ? "–" : formatThreeDigits(now[j]))));
  const heading = el("h2", {}, "Weights of ", data.partial ? quoteWord(data.rows[0]) : renderQueryPicker(data, at, pickRow));
  return [heading, ...rows, told.untouched ? null : el("p", { class: "note" }, "The thin marks show the original weights, without the switches."), all.length > BARS ? el("p", { class: "note" }, `the ${BARS} largest of ${all.length}`) : null].filter(Boolean);
}

function renderQueryPicker(data, at, pickRow) {
  const select = el("select", { "aria-label": "Query", onchange: () => pickRow(Number(select.value)) }, data.rows.map((_, n) => el("option", { value: n, selected: n === at.row }, makeNamer(data.rows)(n))));
  return select;
}
