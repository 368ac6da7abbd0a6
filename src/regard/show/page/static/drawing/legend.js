// The scale of colours at the foot of the page, drawn with its numbers.

import { css, difference, shade, ticks } from "./colour.js";
import { el } from "./el.js";
import { three } from "./numerals.js";

// What a legend of weights shows: {title, colour(share 0 to 1), ticks: [[place, text]]}.
export function ofWeights(scale, title = "weight") {
  return { title, colour: shade, ticks: ticks(scale).map(([place, value]) => [place, tick(value, scale)]) };
}

// What a legend of differences shows, from -high to high.
export function ofDifferences(high, title = "difference") {
  const places = [[0, -high], [0.5, 0], [1, high]];
  return { title, colour: (share) => difference(2 * share - 1), ticks: places.map(([place, value]) => [place, value ? three(value) : "0"]) };
}

const tick = (value, scale) => (value === 0 ? "0" : scale.name === "log" ? power(value) : String(Number(value.toPrecision(2))));

function power(value) {
  const digits = Math.round(Math.log10(value));
  return digits >= -2 ? String(Number(value.toPrecision(1))) : `10⁻${[...String(-digits)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

// The legend as an element.
export function legend({ title, colour, ticks: marks }) {
  const stops = Array.from({ length: 17 }, (_, n) => css(colour(n / 16)));
  return el("div", { class: "legend", role: "img", "aria-label": `Colours: ${title} from ${marks[0][1]} to ${marks.at(-1)[1]}` },
    el("span", {}, title),
    el("div", { class: "ramp", style: { background: `linear-gradient(to right, ${stops.join(", ")})` } }),
    el("div", { class: "ticks numbers" }, marks.map(([place, text]) => el("span", { style: { left: `${100 * place}%` } }, text))),
  );
}
