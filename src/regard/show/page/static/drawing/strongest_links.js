// The strongest links of a word: the other words with their places and weights.

import { el } from "./elements.js";
import { formatCount, formatThreeDigits } from "./number_format.js";
import { renderWord } from "./words.js";

// Render a list of links [{word, place, weight}]; go(one) follows a link.
export function listStrongestLinks(found, go) {
  const most = Math.max(...found.map((one) => one.weight), 1e-12);
  return el("ol", {}, found.map((one) => el("li", {}, renderLink(one, most, () => go(one)))));
}

// Render a link as a button with a word, its place, its weight and a bar.
function renderLink({ word, place, weight }, most, onclick) {
  return el("button", { class: "link", onclick, title: String(weight) },
    el("span", { class: "numbers note" }, formatCount(place)),
    el("span", { class: "link-word" }, renderWord(word, 40)),
    el("span", { class: "numbers" }, formatThreeDigits(weight)),
    el("span", { class: "link-bar", style: { width: `${(100 * weight) / most}%` } }));
}
