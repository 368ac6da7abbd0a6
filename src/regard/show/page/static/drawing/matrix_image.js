// Small pictures of a matrix with one pixel per weight, which the page scales.

import { encodeWeight, decodeWeight } from "../data/weight_codes.js";
import { el } from "./elements.js";

// Draw codes (rows, columns) on a canvas; paint(code) is the value of a pixel.
export function paintCodes(canvas, codes, rows, columns, paint) {
  Object.assign(canvas, { width: columns, height: rows });
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let n = 0; n < pixels.length; n++) pixels[n] = paint(codes[n]);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// Draw numbers (rows, columns) on a canvas in the colors of a function; null is left transparent.
export function paintNumbers(canvas, numbers, rows, columns, colour) {
  Object.assign(canvas, { width: columns, height: rows });
  const image = new ImageData(columns, rows);
  numbers.forEach((value, n) => value !== null && image.data.set([...colour(value), 255], 4 * n));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// Create a canvas that is scaled without smoothing.
export const createPixelCanvas = (attributes) => el("canvas", { ...attributes, class: ["pixels", attributes?.class].filter(Boolean).join(" ") });

// Return the codes of the mean over the first axis of codes (h, rows, columns).
export function averageCodes(codes, [h, rows, columns]) {
  const size = rows * columns;
  return Uint16Array.from({ length: size }, (_, n) => {
    let [sum, seen] = [0, 0];
    for (let head = 0; head < h; head++) {
      const one = codes[head * size + n];
      if (one) [sum, seen] = [sum + decodeWeight(one), seen + 1];
    }
    return seen ? encodeWeight(sum / h) : 0;
  });
}

// Return the mean over the first axis of numbers (h, rows, columns), NaN where all are NaN.
export function averageNumbers(numbers, [h, rows, columns]) {
  const size = rows * columns;
  return Float32Array.from({ length: size }, (_, n) => {
    const seen = Array.from({ length: h }, (_, head) => numbers[head * size + n]).filter((value) => !Number.isNaN(value));
    return seen.length ? seen.reduce((sum, value) => sum + value, 0) / h : NaN;
  });
}
