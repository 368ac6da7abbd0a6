// The color scale at the bottom of the page, with its numbers.

import { formatColor, shadeDifference, shadeSigned, shadeWeight, listTicks } from "./color.js";
import { el } from "./elements.js";
import { formatThreeDigits } from "./number_format.js";

const SIGNED_DECADES = 4; // of a log scale of signed numbers; smaller ones have the color of 0

// Make the content of a legend of weights: {title, colour(share 0 to 1), ticks: [[place, text]]}.
export function makeWeightScale(scale, title = "weight") {
  return { title, colour: shadeWeight, ticks: listTicks(scale).map(([place, value]) => [place, formatTick(value, scale)]) };
}

// Make the content of a legend of differences, from -high to high.
export function makeDifferenceScale(high, shade = shadeDifference) {
  const places = [[0, -high], [0.5, 0], [1, high]];
  return { title: "difference", colour: (share) => shade(2 * share - 1), ticks: places.map(([place, value]) => [place, value ? formatThreeDigits(value) : "0"]) };
}

// Return the share, from -1 to 1, of a number from -high to high in a scale of signed numbers: linear, or log over some decades.
export function shareSigned({ name, high }, value) {
  const size = Math.abs(value) / high;
  return Math.sign(value) * (name === "log" ? Math.max(1 + Math.log10(size) / SIGNED_DECADES, 0) : size);
}

// Make the content of a legend of effects, from -high to high, with the meaning of either color in words.
export function makeSignedScale({ name, high }, { title, raises, lowers }) {
  const shares = name === "linear" ? [-1, 0, 1] : [-1, -0.5, 0, 0.5, 1];
  const size = { linear: Math.abs, root: (share) => share ** 2, log: (share) => share && 10 ** (SIGNED_DECADES * (Math.abs(share) - 1)) }[name];
  const write = (share) => String(Number((high * size(share)).toPrecision(3)));
  const ticks = shares.map((share) => [(share + 1) / 2, `${share < 0 ? "−" : share > 0 ? "+" : ""}${write(share)}`]);
  return { title: `${title}: right ${raises}, left ${lowers}`, colour: (share) => shadeSigned(2 * share - 1), ticks, signs: { raises, lowers } };
}

const formatTick = (value, scale) => (value === 0 ? "0" : scale.name === "log" ? formatPower(value) : String(Number(value.toPrecision(3))));

function formatPower(value) {
  const digits = Math.round(Math.log10(value));
  return digits >= -2 ? String(Number(value.toPrecision(1))) : `10⁻${[...String(-digits)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`;
}

// Draw a legend as an element.
export function drawLegend({ title, colour, ticks: marks, signs }) {
  const stops = Array.from({ length: 17 }, (_, n) => formatColor(colour(n / 16)));
  return el("div", { class: signs ? "legend signed" : "legend", role: "img", "aria-label": `Colors: ${title} from ${marks[0][1]} to ${marks.at(-1)[1]}` },
    signs ? Object.entries(signs).map(([name, text]) => el("span", { class: `sign ${name}` }, text)) : el("span", {}, title),
    el("div", { class: "ramp", style: { background: `linear-gradient(to right, ${stops.join(", ")})` } }),
    el("div", { class: "ticks numbers" }, marks.map(([place, text]) => el("span", { style: { left: `${100 * place}%` } }, text))),
  );
}
