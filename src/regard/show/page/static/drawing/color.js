// The color scale of attention: one hue in perceptually even steps, the same as in the figures, and the ticks of its legend.

import { decodeWeight } from "../data/weight_codes.js";

// OKLCH (lightness, chroma, hue in degrees) of the two ends; on a dark background large weights are bright.
const ENDS = {
  light: [[0.97, 0.012, 250], [0.4, 0.125, 260]],
  dark: [[0.27, 0.025, 260], [0.93, 0.075, 235]],
};
const OTHER = { light: [0.5, 0.135, 45], dark: [0.85, 0.11, 60] }; // the end of negative differences
const SIGNED = {}; // the paper and the two ends of signed colors in OKLab, by theme
const darkness = matchMedia("(prefers-color-scheme: dark)");

// Return whether the page uses the dark theme.
export const isDark = () => darkness.matches;

// Call a listener when the theme changes.
export const onThemeChange = (listener) => darkness.addEventListener("change", listener);

// Return the color [red, green, blue] of a share from 0 (faint) to 1 (strong).
export function shadeWeight(share) {
  const [faint, strong] = ENDS[isDark() ? "dark" : "light"].map(convertToOklab);
  return convertToSrgb(interpolate(faint, strong, clamp(share, 0, 1)));
}

// Return the color of a difference from -1 to 1: the hue of weights above 0, the other hue below 0, faint at 0.
export function shadeDifference(share) {
  const ground = isDark() ? "dark" : "light";
  const [faint, strong] = ENDS[ground].map(convertToOklab);
  const less = convertToOklab(OTHER[ground]);
  return convertToSrgb(interpolate(faint, share < 0 ? less : strong, clamp(Math.abs(share), 0, 1)));
}

// Return the color of an effect from -1 to 1: paper at 0, the color of what raises above 0, of what lowers below.
export function shadeSigned(share) {
  const [paper, lowers, raises] = (SIGNED[isDark() ? "dark" : "light"] ??= ["--paper", "--lowers", "--raises"].map((name) => convertHexToOklab(readBackground(name))));
  return convertToSrgb(interpolate(paper, share < 0 ? lowers : raises, clamp(Math.abs(share), 0, 1)));
}

export const formatColor = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

// Return black or white, whichever has the higher contrast with a color.
export function chooseInk(colour) {
  return computeContrast([0, 0, 0], colour) >= computeContrast([255, 255, 255], colour) ? "#000" : "#fff";
}

// Return the contrast ratio of two colors, 1 to 21 (WCAG 2).
export function computeContrast(a, b) {
  const [low, high] = [computeLuminance(a), computeLuminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}

// Create a scale of weights, linear or log: {name, low, high, share(weight)}.
export function createScale(name, low, high) {
  if (name === "linear") return { name, low: 0, high, share: (w) => w / high };
  const [from, to] = [Math.log2(low), Math.log2(high)];
  return { name: "log", low, high, share: (w) => (w > 0 ? (Math.log2(w) - from) / (to - from) : 0) };
}

// Return "log" or "linear" as in the state, or the default: linear for words, images and short rows, log for long rows.
export const chooseScaleName = (state, keys) => state.scale ?? (["text", "image"].includes(state.view) || keys <= 16 ? "linear" : "log");

// Create the scale of a state for rows of a number of keys; `top` is the largest weight drawn.
export function createStateScale(state, keys, top = 1) {
  const name = chooseScaleName(state, keys);
  if (name === "linear") return createScale("linear", 0, roundUp(top));
  return createScale("log", 10 ** -Math.max(2, Math.ceil(Math.log10(keys)) + 1), 1);
}

// Round a number up to 1, 2, 5, 10 ..., so that the legend is readable and rarely changes.
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].find((digit) => digit * power >= value * 0.999) * power;
}

// Return the pixel value of every code; the pixel of a hidden entry is transparent.
export function buildColorTable(chosen) {
  const pixels = new Uint8ClampedArray(4 * 65536);
  const shades = Array.from({ length: 256 }, (_, n) => shadeWeight(n / 255));
  for (let c = 1; c < 65536; c++) {
    const share = clamp(chosen.share(decodeWeight(c)), 0, 1);
    const [red, green, blue] = shades[Math.round(255 * share)];
    pixels.set([red, green, blue, 255], 4 * c);
  }
  return new Uint32Array(pixels.buffer);
}

// List the ticks of a legend as [place from 0 to 1, weight].
export function listTicks(chosen) {
  if (chosen.name !== "log") return [0, 0.5, 1].map((share) => [share, (chosen.name === "root" ? share ** 2 : share) * chosen.high]);
  const decades = Math.round(Math.log10(chosen.high / chosen.low));
  const step = Math.ceil(decades / 4);
  const found = [];
  for (let n = decades; n >= 0; n -= step) found.unshift([n / decades, chosen.low * 10 ** n]);
  return found;
}

// Return the color of a custom property of the page, for canvases.
export function readBackground(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const interpolate = (a, b, share) => a.map((low, n) => low + (b[n] - low) * share);

// Convert OKLCH to OKLab.
function convertToOklab([lightness, chroma, hue]) {
  const turn = (hue * Math.PI) / 180;
  return [lightness, chroma * Math.cos(turn), chroma * Math.sin(turn)];
}

// Convert sRGB in hexadecimal, "#2166ac", to OKLab (Ottosson 2020).
function convertHexToOklab(hex) {
  const [red, green, blue] = hex.match(/[0-9a-f]{2}/gi).map((part) => decodeGamma(parseInt(part, 16) / 255));
  const long = Math.cbrt(0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue);
  const medium = Math.cbrt(0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue);
  const short = Math.cbrt(0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue);
  return [
    0.2104542553 * long + 0.793617785 * medium - 0.0040720468 * short,
    1.9779984951 * long - 2.428592205 * medium + 0.4505937099 * short,
    0.0259040371 * long + 0.7827717662 * medium - 0.808675766 * short,
  ];
}

// Convert OKLab to sRGB (Ottosson 2020).
function convertToSrgb([lightness, a, b]) {
  const long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const lights = [
    4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
    -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
    -0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short,
  ];
  return lights.map((light) => Math.round(255 * clamp(encodeGamma(light), 0, 1)));
}

const encodeGamma = (light) => (light <= 0.0031308 ? 12.92 * light : 1.055 * light ** (1 / 2.4) - 0.055);
const decodeGamma = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);

function computeLuminance(colour) {
  const [red, green, blue] = colour.map((part) => decodeGamma(part / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
