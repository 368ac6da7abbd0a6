// The sentences of Compare: the weights of a cell on both sides, and the largest differences.

import { el, isTouch } from "../../drawing/elements.js";
import { formatCount, formatSigned, formatThreeDigits } from "../../drawing/number_format.js";
import { isTwin, quoteWord, renderNamedWord } from "../../drawing/words.js";

// Create the line that shows the numbers of a cell i, j of the pictures `now` on both sides; i is null for no cell.
export function createReadingLine() {
  const element = el("p", { class: "compare-read numbers", "aria-live": "polite" });

  function show(now, i, j) {
    if (i === null) return element.replaceChildren(`${isTouch() ? "Tap" : "Point at"} a cell to read its ${now.quantity.noun} in both.`);
    const [a, b] = now.parts.map((one) => (i < one.rows && j < one.columns ? one.weights[i * one.columns + j] : null));
    const inside = i < now.apart.rows && j < now.apart.columns && (a !== null || b !== null);
    return element.replaceChildren(describeCell(now, i, j), renderValue("first", a, now.quantity.write), renderValue("second", b, now.quantity.write), inside ? renderValue("difference", (b ?? 0) - (a ?? 0), formatSigned) : "");
  }

  // Append the rank of the weights of both cells, with every digit in the title; a side without the cell is null.
  function exact(cells, isWeight) {
    const describeRank = (cell) => (cell.visible && cell.weight === null ? "not a number (NaN)" : cell.visible ? `${isWeight ? "" : `${formatThreeDigits(cell.weight)}, `}rank ${cell.rank} of ${cell.of}` : "not visible");
    const name = (n) => `${n ? "second" : "first"}${isWeight ? "" : ", weight"}`;
    element.append(...cells.map((cell, n) => cell && el("span", { class: "note", title: cell.visible && cell.weight !== null ? String(cell.weight) : null }, `${name(n)}: ${describeRank(cell)}`)).filter(Boolean));
  }

  return { element, show, exact };
}

function describeCell(now, i, j) {
  const size = 2 ** now.level;
  const name = (axis, n) => {
    const words = now.parts.map((one) => one.words[axis]);
    const from = n * size;
    if (size > 1) return `${quoteWord(words[0][from] ?? words[1][from])} to ${quoteWord(words[0][from + size - 1] ?? words[0].at(-1))}`;
    const [a, b] = words.map((some) => some[from]);
    const place = words.some((some) => n < some.length && isTwin(some, n)) ? ` at ${formatCount(n)}` : "";
    return (a === undefined || b === undefined || a === b ? quoteWord(a ?? b) : `${quoteWord(a)} or ${quoteWord(b)}`) + place;
  };
  return el("b", {}, `${name("rows", i)} → ${name("columns", j)}`);
}

function renderValue(name, number, write) {
  const text = number === null ? "not visible" : write(number);
  return el("span", {}, `${name} `, el("b", {}, text));
}

// Render a list of cells [[row, column, difference]] with a button for each.
export function renderFurthestCells(found, [a, b], { write }, pin) {
  const line = ([i, j]) => {
    const [first, second] = [a, b].map((one) => one.weights[i * one.columns + j] ?? 0);
    return el("button", { class: "quiet compare-place", onclick: () => pin(i, j) },
      el("span", {}, renderNamedWord(a.words.rows, i), " → ", renderNamedWord(a.words.columns, j)),
      el("span", { class: "numbers" }, `${write(first)} → ${write(second)}`),
      el("span", { class: "numbers" }, formatSigned(second - first)));
  };
  return [el("h2", {}, "Largest differences"), el("ol", {}, found.map((one) => el("li", {}, line(one))))];
}
