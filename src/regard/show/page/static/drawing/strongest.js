// The strongest links of a word: the other words, their places and weights, each a step away.

import { el } from "./el.js";
import { count, three } from "./numerals.js";
import { shown } from "./words.js";

// A list of what was found, [{word, place, weight}], the largest first; go(one) follows a link.
export function strongest(found, go) {
  const most = Math.max(...found.map((one) => one.weight), 1e-12);
  return el("ol", {}, found.map((one) => el("li", {}, link(one, most, () => go(one)))));
}

// A word, its place and its weight with a bar, as a button.
function link({ word, place, weight }, most, onclick) {
  return el("button", { class: "link", onclick, title: String(weight) },
    el("span", { class: "numbers note" }, count(place)),
    el("span", { class: "link-word" }, shown(word, 40)),
    el("span", { class: "numbers" }, three(weight)),
    el("span", { class: "link-bar", style: { width: `${(100 * weight) / most}%` } }));
}
