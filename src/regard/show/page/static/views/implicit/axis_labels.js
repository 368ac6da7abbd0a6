// The words of the tokens beside the matrix of a layer without a softmax, or their numbers where words do not fit.

import { el } from "../../drawing/elements.js";
import { formatCount, roundStep } from "../../drawing/number_format.js";
import { formatPlainWord } from "../../drawing/words.js";

const WORDS = 13; // minimum pixels of a token for its word
const NUMBERS = 70; // minimum pixels between numbers
const LEVEL = 70; // pixels of a column whose word is not turned
const NARROW = 560; // pixels of a sheet

// Return the pixels of a token, the space left of and above the matrix for its labels, and whether these are words.
export function measureLabels({ width, height }, { queries, keys }) {
  const fit = (left, top) => ({ left, top, each: Math.min((width - left) / keys, (height - top) / queries) });
  const wordy = width < NARROW ? fit(74, 66) : fit(118, 92);
  return wordy.each >= WORDS ? { ...wordy, isWordy: true } : { ...fit(48, 22), isWordy: false };
}

// Render the labels of an axis of `count` tokens, each `size` pixels long; name(n) is the word of token n, or its number.
export function renderLabels(axis, { count, size, room, isWordy, most, offset }, name) {
  const step = isWordy ? 1 : roundStep(NUMBERS / size);
  return Array.from({ length: Math.ceil(count / step) }, (_, n) => {
    const text = isWordy ? formatPlainWord(name(n * step), most) : formatCount(n * step + offset);
    const label = el("span", { "data-n": n * step, class: axis === "columns" && isWordy && size <= LEVEL && text.length > 1 && "turned" }, text);
    const middle = `${(n * step + 0.5) * size}px`;
    Object.assign(label.style, axis === "rows" ? { top: middle, maxWidth: `${room - 8}px` } : { left: middle, maxHeight: `${room - 6}px` });
    return label;
  });
}
