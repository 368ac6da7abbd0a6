// What the pictures of attention show: the weight, or what it does. A quantity knows its numbers, its colors and its words.

import { decodeWeight } from "../data/weight_codes.js";
import { buildColorTable, createStateScale, roundUp, shadeSigned, shadeWeight } from "./color.js";
import { makeSignedScale, makeWeightScale } from "./legend.js";
import { averageCodes, averageNumbers } from "./matrix_image.js";
import { formatSigned, formatThreeDigits } from "./number_format.js";
import { quoteWord } from "./words.js";

const FAINTEST = decodeWeight(2);
const SHADES = 128; // on either side of 0

// Return the quantity of a setting; `target` is {word} of the logit that pull and cut are about, or undefined until it is known,
// or {number}, another number in words. The setting "entry" is of layers without a softmax.
export function createQuantity(setting, target) {
  if (setting === "weight") return WEIGHT;
  if (setting === "entry") return ENTRY;
  return setting === "carried" ? CARRIED : createSigned(setting, target);
}

// Numbers as 16-bit codes.
const WEIGHT = {
  name: "weight",
  noun: "weight",
  decode: decodeWeight,
  measure: (codes) => decodeWeight(codes.reduce((most, code) => Math.max(most, code), 2)),
  least: FAINTEST,
  average: averageCodes,
  pool: (codes, from, to) => {
    let most = 0;
    for (let n = from; n < to && n < codes.length; n++) if (codes[n] > most) most = codes[n];
    return most;
  },
  makeScale: createStateScale,
  makePictureScale: createStateScale,
  writeCell: (value) => (value < 9.5e-4 && value > 0 ? value.toExponential(0).replace("-", "−") : value.toFixed(value < 0.005 && value > 0 ? 3 : 2)),
  shade: (scale, value) => shadeWeight(scale.share(value)),
  paint: (scale) => {
    const table = buildColorTable(scale);
    return (code) => table[code];
  },
  makeLegend: (scale, pixel, before = "") => makeWeightScale(scale, `${before}weight${pixel ? `, ${pixel}` : ""}`),
  write: formatThreeDigits,
  format: String,
};

// Write a number that is not negative in a cell: two digits, or its power of ten.
const writeSize = (size) => (size === 0 ? "0" : size < 0.005 ? size.toExponential(0).replace("-", "−") : size.toFixed(2));

// Numbers as they are, NaN where nothing is visible.
const NUMBERS = {
  decode: (value) => (Number.isNaN(value) ? null : value),
  measure: (values) => values.reduce((most, value) => (Math.abs(value) > most ? Math.abs(value) : most), 0),
  least: 0,
  pool: (values, from, to) => {
    let most = NaN;
    for (let n = from; n < to && n < values.length; n++) if (Number.isNaN(most) || Math.abs(values[n]) > Math.abs(most)) most = values[n];
    return most;
  },
  makeScale: (state, keys, top) => createSignedScale("linear", top),
  makePictureScale: (state, keys, top) => createSignedScale("root", top),
  average: averageNumbers,
  writeCell: (value) => `${value < 0 ? "−" : ""}${writeSize(Math.abs(value))}`,
  paint(scale) {
    const shades = Array.from({ length: 2 * SHADES + 1 }, (_, n) => packPixel(this.shade({ share: (share) => share }, (n - SHADES) / SHADES)));
    return (value) => (Number.isNaN(value) ? 0 : shades[SHADES + Math.round(SHADES * Math.min(Math.max(scale.share(value), -1), 1))]);
  },
};

const CARRIED = {
  ...NUMBERS,
  name: "carried",
  description: "how much each key writes to each query",
  noun: "amount carried",
  shade: (scale, value) => shadeWeight(scale.share(value)),
  makeLegend: (scale, pixel, before = "") => makeWeightScale(scale, `${before}${before ? "amount " : ""}carried${pixel ? `, ${pixel}` : ""}`),
  explain: (incoming) => (incoming ? "how much it takes from" : "how much it passes on to"),
  write: formatThreeDigits,
  format: String,
};

// Entries of layers without a softmax.
const ENTRY = {
  ...NUMBERS,
  name: "entry",
  isSigned: true,
  shade: (scale, value) => shadeSigned(scale.share(value)),
  makeLegend: (scale) => makeSignedScale(scale, { title: "signed entries, whose rows need not sum to 1", raises: "above 0", lowers: "below 0" }),
  write: formatSigned,
  format: formatSigned,
};

const NOUNS = { pull: "pull", cut: "change by a cut" };

function createSigned(setting, target) {
  const of = target?.number ?? (target ? `the logit of ${quoteWord(target.word)}` : "the logit");
  const raises = setting === "cut" ? `cutting it raises ${of}` : `raises ${of}`;
  return {
    ...NUMBERS,
    name: setting,
    noun: NOUNS[setting],
    of,
    shade: (scale, value) => shadeSigned(scale.share(value)),
    explain: (incoming) => (setting === "cut" ? `how much ${of} changes if it ${incoming ? "cannot see" : "is hidden from"}` : `how much it moves ${of} through ${incoming ? "its attention to" : "the attention of"}`),
    makeLegend: (scale, pixel, before = "") => makeSignedScale(scale, { title: `${before}${setting}${pixel ? `, ${pixel}` : ""}`, raises, lowers: "lowers it" }),
    isSigned: true,
    description: setting === "cut" ? `how ${of} changes if the key is hidden` : `how each weight moves ${of}`,
    write: formatSigned,
    writeCell: (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${writeSize(Math.abs(value))}`,
    format: (value) => (value ? `${formatSigned(value)}, ${value > 0 ? "raises" : "lowers"}` : formatSigned(value)),
  };
}

// Create a scale from -high to high, linear for words, or of roots for pictures, where most numbers are small; share(0) is 0.
function createSignedScale(name, top) {
  const high = roundUp(top);
  const share = (value) => (name === "root" ? Math.sign(value) * Math.sqrt(Math.abs(value) / high) : value / high);
  return { name, low: 0, high, share };
}

const pixel = new Uint32Array(1);
const parts = new Uint8ClampedArray(pixel.buffer);

function packPixel([red, green, blue]) {
  parts.set([red, green, blue, 255]);
  return pixel[0];
}
