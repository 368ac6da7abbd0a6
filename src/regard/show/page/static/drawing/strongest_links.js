// The strongest links of a word: the other words with their places and weights.

import { el } from "./elements.js";
import { formatCount } from "./number_format.js";
import { renderWord } from "./words.js";

// Render a list of links [{word, place, weight}]; go(one) follows a link; quantity is what they measure.
export function listStrongestLinks(found, go, quantity) {
  const most = Math.max(...found.map((one) => Math.abs(one.weight)), 1e-12);
  return el("ol", {}, found.map((one) => el("li", {}, renderLink(one, most, () => go(one), quantity))));
}

// Return the numbers of a row or a column that are largest in size, with their words; words(place) returns a promise.
export async function findLargest(numbers, count, words) {
  const places = [...numbers.keys()].filter((place) => numbers[place]);
  const found = places.sort((a, b) => Math.abs(numbers[b]) - Math.abs(numbers[a])).slice(0, count);
  return Promise.all(found.map(async (place) => ({ place, weight: numbers[place], word: await words(place) })));
}

// Render a link as a button with a word, its place, its weight and a bar.
function renderLink({ word, place, weight }, most, onclick, { isSigned, write, format }) {
  const side = isSigned ? ["link-bar", weight < 0 ? "lowers" : "raises"].join(" ") : "link-bar";
  return el("button", { class: "link", onclick, title: format(weight) },
    el("span", { class: "numbers note" }, formatCount(place)),
    el("span", { class: "link-word" }, renderWord(word, 40)),
    el("span", { class: "numbers" }, write(weight)),
    el("span", { class: side, style: { width: `${(100 * Math.abs(weight)) / most}%` } }));
}
