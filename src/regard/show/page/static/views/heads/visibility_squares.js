// Three squares of who may see whom: expected, found and their difference; pointer and arrow keys select a pair in all three.

import { formatColor, shadeDifference, chooseInk } from "../../drawing/color.js";
import { el } from "../../drawing/elements.js";
import { formatPlainWord } from "../../drawing/words.js";

const TITLES = ["expected", "found", "difference"];
const LETTERS = 9; // of a word next to a square
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const MORE = "+";
const LESS = "−"; // MORE: sees a word that it may not see; LESS: does not see a word that it may see

// Create the squares; call hover(pair or null) for the pointer, and pick(i, j) for a click or an arrow key.
export function createSquares({ hover, pick }) {
  const three = el("div", { class: "sight-squares", tabindex: 0, role: "group", "aria-label": "Who may see whom: arrow keys go from pair to pair" });
  const key = el("p", { class: "note sight-key" });
  const element = el("div", {}, three, key);
  let [reach, at] = [null, null];

  const cells = ([i, j]) => three.querySelectorAll(`td[data-i="${i}"][data-j="${j}"]`);

  function set(found) {
    [reach, at] = [found, null];
    element.hidden = !found;
    three.replaceChildren(...(found ? TITLES.map((title, n) => renderSquare(title, found.words, (i, j) => classifyPair(found, i, j)[n])) : []));
    key.replaceChildren(...(found ? renderLegend(found) : []));
  }

  function mark(pair) {
    if (at) for (const cell of cells(at)) cell.classList.remove("sight-at");
    at = pair;
    if (at) for (const cell of cells(at)) cell.classList.add("sight-at");
  }

  const under = (event) => {
    const cell = event.target.closest?.("td[data-i]");
    return cell && [Number(cell.dataset.i), Number(cell.dataset.j)];
  };
  three.addEventListener("pointerover", (event) => event.pointerType === "mouse" && hover(under(event)));
  three.addEventListener("pointerleave", () => hover(null));
  three.addEventListener("click", (event) => under(event) && pick(...under(event)));
  three.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step || !at || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault(); // else Heads selects another head
    const next = at.map((n, axis) => Math.min(Math.max(n + step[axis], 0), reach.words.length - 1));
    pick(...next);
  });

  return { element, set, mark };
}

// Return [sees, sign] of a pair for each square.
function classifyPair({ expected, found }, i, j) {
  const [may, does] = [expected[i][j], found[i][j]];
  const sign = does === may ? "" : does ? MORE : LESS;
  return [[may, ""], [does, sign], [false, sign]];
}

function renderSquare(title, words, look) {
  const top = el("tr", {}, el("td"), words.map((word, j) => el("th", { scope: "col", title: `${formatPlainWord(word)}, token ${j}` }, el("span", {}, formatPlainWord(word, LETTERS)))));
  const rows = words.map((word, i) => el("tr", {}, el("th", { scope: "row", title: `${formatPlainWord(word)}, token ${i}` }, formatPlainWord(word, LETTERS)), words.map((_, j) => renderCell(i, j, ...look(i, j)))));
  return el("table", { class: "sight-square" }, el("caption", {}, title), el("thead", {}, top), el("tbody", {}, rows));
}

function renderCell(i, j, sees, sign) {
  return el("td", { "data-i": i, "data-j": j, class: sees && !sign && "sight-sees", style: sign === MORE && styleDifference() }, sign);
}

// Return the style of a leak: the color of the lower end of a difference.
function styleDifference() {
  const colour = shadeDifference(-1);
  return { backgroundColor: formatColor(colour), color: chooseInk(colour) };
}

// Render the legend of the marks that are present.
function renderLegend({ expected, found }) {
  const signs = new Set(expected.flatMap((row, i) => row.map((_, j) => classifyPair({ expected, found }, i, j)[2][1])));
  const one = (name, style, sign, said) => el("span", {}, el("i", { class: name, style }, sign), ` ${said}`);
  return [
    "Each row is a query, each column a key, through all layers. ",
    one("sight-sees", null, "", "sees "),
    one("", null, "", "does not "),
    signs.has(MORE) && one("", styleDifference(), MORE, "may not, but does "),
    signs.has(LESS) && one("", null, LESS, "may, but no effect was found"),
  ].filter(Boolean);
}
