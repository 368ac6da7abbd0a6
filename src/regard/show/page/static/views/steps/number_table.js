// A heat map table of numbers with words: as HTML with selectable cells, as SVG, and as text with every digit.

import { formatColor, readBackground, chooseInk, shadeWeight } from "../../drawing/color.js";
import { el, svg } from "../../drawing/elements.js";
import { alignNumbers, formatCount } from "../../drawing/number_format.js";
import { formatPlainWord, renderWord } from "../../drawing/words.js";

const WRITTEN = 16; // maximum number of columns with numbers in the cells; wider tables show only colors
const SIDE = { width: 58, height: 28, label: 104, head: 30 }; // pixels of a cell of the SVG, and of its words

// Return whether a table is too wide for numbers in its cells.
export const isDense = ({ columns }) => columns.length > WRITTEN;

// Create a figure of a panel {title, rows, columns, values, axes, ends, shade(share from 0 to 1), hidden(i, j), places of its rows,
// texts of its numbers}; focus {row, column} is marked, and the pointer calls pick(row, column, hovering).
export function createPanel({ title, rows, columns, values, ends, shade = shadeWeight, focus, pick, axes, hidden, places, texts = alignNumbers(values) }) {
  const dense = isDense({ columns });
  const [low, high] = ends ?? findRange(values);
  const body = values.map((row, i) =>
    el(
      "tr",
      { class: focus?.row === i ? "panel-asks" : null },
      renderLabel(rows[i], places?.[i] ?? i, "row", axes !== "numbers", pick && (() => pick(i, null)), focus?.row === i, Boolean(places)),
      row.map((value, j) => {
        const colour = hidden?.(i, j) || !Number.isFinite(value) ? null : shade((value - low) / (high - low));
        return renderCell(dense ? null : texts[i][j], colour, focus?.row === i && focus?.column === j);
      }),
    ),
  );
  const top = el("tr", {}, el("td", { class: "panel-corner" }), columns.map((word, j) => renderLabel(dense && axes !== "pairs" && j % 8 ? "" : word, j, "col", axes === "pairs", null, focus?.column === j)));
  const table = el("table", { class: ["panel numbers", dense && "panel-dense", dense && axes !== "pairs" && "panel-counted"].filter(Boolean).join(" ") }, el("thead", {}, top), el("tbody", {}, body));
  if (pick) listenToPointer(table, pick);
  return el("figure", { class: "panel-figure" }, el("figcaption", {}, title ?? "", renderLegend(low, high, shade)), el("div", { class: "panel-scroll" }, table));
}

// Return the smallest and the largest finite number.
export function findRange(values) {
  const finite = values.flat().filter(Number.isFinite);
  const [low, high] = [Math.min(...finite), Math.max(...finite)];
  return finite.length === 0 ? [0, 1] : high > low ? [low, high] : [low - 0.5, high + 0.5];
}

// Render the word of a row or a column, with its position if the words are only some of the text.
function renderLabel(word, place, scope, isWord, choose, chosen, placed) {
  const name = isWord ? [placed && el("span", { class: "note numbers" }, formatCount(place), " "), renderWord(word)] : [String(word)];
  if (word === "" && !choose && !chosen) return el("td", {}, el("span", {})); // of a dense table, where only some columns are numbered
  const title = isWord ? `${formatPlainWord(word)}, token ${formatCount(place)}` : null;
  if (!choose) return el("th", { scope, title, class: chosen ? "panel-chosen" : null }, el("span", { class: isWord && formatPlainWord(word).length === 1 && "panel-upright" }, name));
  const button = el("button", { type: "button", class: "quiet", title, "aria-pressed": String(Boolean(chosen)), onclick: choose }, name);
  return el("th", { scope, class: chosen ? "panel-chosen" : null }, button);
}

function renderCell(text, colour, chosen) {
  const style = colour && { backgroundColor: formatColor(colour), color: chooseInk(colour) };
  const kind = [colour ? null : "panel-hidden", chosen ? "panel-cell" : null].filter(Boolean).join(" ") || null;
  return el("td", { class: kind, style }, text);
}

// Call pick for the cell under the pointer, with one listener for the table.
function listenToPointer(table, pick) {
  const findPlace = (event) => {
    const found = event.target.closest("tbody td");
    return found && [found.parentElement.rowIndex - 1, found.cellIndex - 1];
  };
  table.addEventListener("click", (event) => {
    const place = findPlace(event);
    if (place) pick(...place);
  });
  table.addEventListener("pointerover", (event) => {
    const place = event.pointerType === "mouse" && findPlace(event);
    if (place) pick(...place, true);
  });
  table.addEventListener("pointerleave", () => pick(null, null, true));
}

// Render the color scale of a panel with its numbers.
export function renderLegend(low, high, shade = shadeWeight) {
  const stops = Array.from({ length: 9 }, (_, n) => formatColor(shade(n / 8))).join(", ");
  return el(
    "span",
    { class: "panel-legend numbers" },
    alignNumbers([[low]])[0][0],
    el("span", { class: "panel-ramp", style: { backgroundImage: `linear-gradient(to right, ${stops})` } }),
    alignNumbers([[high]])[0][0],
  );
}

// Export panels under a heading as the text of an SVG file.
export function exportPanels(heading, panels) {
  const drawn = [];
  let [y, wide] = [52, 320];
  for (const { title, rows, columns, values, ends, shade = shadeWeight, hidden, places, texts = alignNumbers(values) } of panels) {
    const [low, high] = ends ?? findRange(values);
    drawn.push(writeSvgText(16, y, title ?? "", { "font-weight": 600 }));
    columns.forEach((word, j) => drawn.push(writeSvgText(SIDE.label + (j + 0.5) * SIDE.width, y + 20, formatPlainWord(word, 8), { "text-anchor": "middle" })));
    values.forEach((row, i) => {
      const top = y + SIDE.head + i * SIDE.height;
      drawn.push(writeSvgText(SIDE.label - 8, top + 19, (places ? `${formatCount(places[i])} ` : "") + formatPlainWord(rows[i], places ? 8 : 12), { "text-anchor": "end" }));
      row.forEach((value, j) => {
        const colour = hidden?.(i, j) || !Number.isFinite(value) ? null : shade((value - low) / (high - low));
        drawn.push(...writeSvgSquare(SIDE.label + j * SIDE.width, top, texts[i][j], colour));
      });
    });
    y += SIDE.head + values.length * SIDE.height + 36;
    wide = Math.max(wide, SIDE.label + columns.length * SIDE.width + 16);
  }
  const root = svg("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${wide} ${y}`, width: wide, height: y, "font-family": "sans-serif", "font-size": 13 });
  root.append(svg("rect", { width: wide, height: y, fill: readBackground("--paper") }), writeSvgText(16, 26, heading, { "font-size": 15 }), ...drawn);
  return new XMLSerializer().serializeToString(root);
}

function writeSvgSquare(x, y, said, colour) {
  const box = svg("rect", { x, y, width: SIDE.width - 2, height: SIDE.height - 2, fill: colour ? formatColor(colour) : readBackground("--hidden") });
  return [box, writeSvgText(x + SIDE.width / 2 - 1, y + 18, said, { "text-anchor": "middle", fill: colour ? chooseInk(colour) : readBackground("--faint") })];
}

function writeSvgText(x, y, said, attributes = {}) {
  return svg("text", { x, y, fill: readBackground("--ink"), ...attributes }, said);
}

// Format a table with every digit as tab-separated text, for a spreadsheet.
export function formatTabbed({ rows, columns, values }) {
  const lines = values.map((row, i) => [rows[i], ...row].map(flattenText).join("\t"));
  return [["", ...columns].map(flattenText).join("\t"), ...lines].join("\n");
}

const flattenText = (value) => String(value).replace(/[\t\r\n]+/g, " ");
