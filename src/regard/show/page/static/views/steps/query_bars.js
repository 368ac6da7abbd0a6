// The weights of a query as bars, or what the switch selects in their place.

import { formatColor, shadeSigned, shadeWeight } from "../../drawing/color.js";
import { el } from "../../drawing/elements.js";
import { formatCount, formatThreeDigits } from "../../drawing/number_format.js";
import { isTwin, quoteWord, renderWord } from "../../drawing/words.js";
import { makeNamer } from "./narration.js";

const BARS = 16; // maximum number of words listed
const HEADINGS = { carried: "Carried to", pull: "Pull through", cut: "Change if hidden from" }; // followed by the query

// Render the bars; if a switch is set, a mark shows the original weight of the head. The numbers of an effect are of the head as it
// ran, whatever the switches.
export function renderBars(told, data, at, { pickColumn, pickRow, hover }) {
  const { effect } = told;
  const own = told.own.weights[at.row];
  const now = effect ? effect.values[at.row] : told.steps.weights[at.row];
  const marked = !told.untouched && !effect;
  const write = effect ? effect.quantity.write : formatThreeDigits;
  const hidden = effect ? told.own.masked[at.row] : told.steps.masked[at.row];
  const all = now.map((_, j) => j);
  const listed = all.length > BARS ? all.sort((a, b) => Math.abs(now[b]) - Math.abs(now[a])).slice(0, BARS).sort((a, b) => a - b) : all;
  const top = Math.max(...now.map(Math.abs), ...(marked ? own : []), 1e-9);
  const shade = (share) => (effect?.quantity.isSigned ? shadeSigned(share) : shadeWeight(0.25 + 0.75 * share));
  const places = data.places ?? (data.columns.some((_, j) => isTwin(data.columns, j)) ? data.columns.map((_, j) => j) : null);
  const rows = listed.map((j) =>
    el("button", { class: places ? "steps-bar steps-placed quiet" : "steps-bar quiet", "aria-pressed": String(j === at.column), onclick: () => pickColumn(j), onpointerenter: (event) => event.pointerType === "mouse" && hover(j), onpointerleave: () => hover(null), onfocus: () => hover(j) },
      el("span", { class: "steps-word" }, places && el("span", { class: "note numbers" }, formatCount(places[j]), " "), renderWord(data.columns[j])),
      el("span", { class: "steps-track" },
        el("span", { class: "steps-fill", style: { width: `${(100 * Math.abs(now[j])) / top}%`, backgroundColor: formatColor(shade(now[j] / top)) } }),
        marked ? el("span", { class: "steps-was", style: { left: `${(100 * own[j]) / top}%` }, title: `original: ${formatThreeDigits(own[j])}` }) : null),
      el("span", { class: "numbers" }, hidden[j] === -Infinity ? "–" : write(now[j]))));
  const heading = el("h2", {}, effect ? `${HEADINGS[effect.quantity.name]} ` : "Weights of ", data.partial ? quoteWord(data.rows[0]) : renderQueryPicker(data, at, pickRow));
  const notes = [marked && "The thin marks show the original weights, without the switches.", effect && !told.untouched && "These are of the head as it ran, without the switches.", all.length > BARS && `the ${BARS} largest of ${all.length}`];
  return [heading, ...rows, ...notes.filter(Boolean).map((text) => el("p", { class: "note" }, text))];
}

function renderQueryPicker(data, at, pickRow) {
  const select = el("select", { "aria-label": "Query", onchange: () => pickRow(Number(select.value)) }, data.rows.map((_, n) => el("option", { value: n, selected: n === at.row }, makeNamer(data.rows)(n))));
  return select;
}
