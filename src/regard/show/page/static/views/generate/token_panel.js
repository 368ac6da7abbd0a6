// The panel of the selected word: what it looked at and what moved it, side by side, and the alternatives.

import { el } from "../../drawing/elements.js";
import { formatCount, formatPercent, formatSigned, formatThreeDigits } from "../../drawing/number_format.js";
import { quoteWord, renderWord } from "../../drawing/words.js";

const MOST = 4; // number of words listed of those that moved it, as many as those that it looked at
const TITLES = { pull: "was moved by", cut: "would change without", carried: "took from" };
const LATER = "Known once the text is complete.";
const NEVER = "Not known: the model did not read this text as a whole.";
const LOOKED = "Weights: the mean over the heads of the last layers.";
const TOOK = "Signed entries, which multiply the values in its output: the mean over the heads of the last layers, none of which has a softmax.";
const NO_WEIGHTS = "What moved it is measured on the weights of a softmax, and this model has none.";
const NOTES = {
  pull: "Weight times gradient, summed over all tokens and heads: + raised its logit, − lowered it.",
  cut: "The change of its logit, to first order, if no token could see this one: + is a rise, − a fall.",
  carried: "The weight times the length of what the token writes, the mean over the same heads.",
};

export function createTokenPanel() {
  const [looked, moves, likely] = ["generate-list generate-looked", "generate-list generate-moves", "generate-list"].map((name) => el("ol", { class: name }));
  const [which, lookedTitle] = [el("h2"), el("h3")];
  const [title, note, lookedNote] = [el("h3", {}, TITLES.pull), el("p", { class: "note" }), el("p", { class: "note" })];
  const element = el("aside", { class: "generate-side", "aria-label": "Selected token", hidden: true }, which,
    el("div", { class: "generate-causes" },
      el("section", {}, lookedTitle, looked, lookedNote),
      el("section", {}, title, moves, note)),
    el("section", {}, el("h3", {}, "Alternatives"), likely));
  let standing = null; // the word whose movers are listed

  // Show a generated word; what it looked at is known once the text is complete, and what moved it once `moved` is called.
  function show(line, { isWritten, isStopped, isSigned }) {
    const { word, probability, likeliest, looked: places = [] } = line;
    element.hidden = false;
    which.replaceChildren("Token ", quoteWord(word));
    lookedTitle.textContent = isSigned ? "took from" : "looked at";
    const write = isSigned ? formatSigned : formatThreeDigits;
    looked.replaceChildren(...markTwins(places).map((one) => renderCause(one, Math.abs(one.weight / places[0].weight), write(one.weight), isSigned ? one.weight : 0)));
    const missing = isStopped ? NEVER : LATER;
    lookedNote.textContent = line.looked ? (isSigned ? TOOK : LOOKED) : missing;
    const all = likeliest.some((one) => one.word === word) ? likeliest : [...likeliest, { word, probability }];
    likely.replaceChildren(...all.map((one) => renderProbabilityBar(one.word, one.probability / all[0].probability, formatPercent(one.probability), one.word === word)));
    moves.setAttribute("aria-busy", String(isWritten && !isSigned && standing !== line));
    if (standing === line && isWritten) return;
    standing = null;
    title.textContent = TITLES.pull;
    moves.replaceChildren();
    note.textContent = isSigned ? NO_WEIGHTS : isWritten ? "" : missing;
  }

  // List the words that moved a line most; `found` has the numbers of all words, and the head with the largest part of each.
  function moved(line, { numbers, heads, setting }, quantity, getWord) {
    standing = line;
    const order = numbers.map((_, place) => place).filter((place) => numbers[place]);
    const largest = order.sort((a, b) => Math.abs(numbers[b]) - Math.abs(numbers[a])).slice(0, MOST);
    const most = Math.abs(numbers[largest[0]] ?? 1);
    title.textContent = TITLES[setting];
    note.textContent = NOTES[setting];
    moves.setAttribute("aria-busy", "false");
    moves.replaceChildren(...markTwins(largest.map((place) => ({ place, word: getWord(place) }))).map((one) => {
      const { place } = one;
      const said = `${quantity.format(numbers[place])}${heads ? `; most by head ${heads[place]}` : ""}`;
      return renderCause(one, Math.abs(numbers[place]) / most, quantity.write(numbers[place]), quantity.isSigned ? numbers[place] : 0, said);
    }));
  }

  return { element, show, moved };
}

// Mark the words that stand more than once in a list: only these are told apart by their places, "happy at 11".
const markTwins = (list) => list.map((one) => ({ ...one, isTwin: list.filter(({ word }) => word.trim() === one.word.trim()).length > 1 }));

// Render a word that was looked at or that moved another one: its word and number over a bar, whose color is the sign's.
function renderCause({ word, place, isTwin }, share, text, sign = 0, title = null) {
  const side = sign ? (sign > 0 ? "raises" : "lowers") : null;
  return el("li", { class: "generate-cause", title: title ?? `token ${formatCount(place)}` },
    el("span", { class: "generate-name" }, el("span", { class: "generate-word" }, renderWord(word)), isTwin && el("small", { class: "generate-place" }, `at ${formatCount(place)}`)),
    el("span", { class: "numbers" }, text),
    el("span", { class: "generate-track" }, el("span", { class: side, style: { width: `${100 * share}%` } })));
}

// Render a likely word with a bar and its probability.
function renderProbabilityBar(word, share, text, isChosen) {
  return el("li", { class: isChosen ? "generate-bar generate-chosen" : "generate-bar" },
    el("span", { class: "generate-word" }, renderWord(word)),
    el("span", { class: "generate-track" }, el("span", { style: { width: `${100 * share}%` } })),
    el("span", { class: "numbers" }, text));
}
