// Small pictures of a matrix, a pixel a weight, scaled by the page: for heads in a row, and for two beside each other.

import { encodeWeight, decodeWeight } from "../data/weight_codes.js";
import { el } from "./elements.js";

// Draws codes (rows, columns) on a canvas, each in its colour of a table of colours.
export function paintCodes(canvas, codes, rows, columns, table) {
  Object.assign(canvas, { width: columns, height: rows });
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let n = 0; n < pixels.length; n++) pixels[n] = table[codes[n]];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// Draws numbers (rows, columns) on a canvas by a function of colour, null where there is nothing to draw.
export function paintNumbers(canvas, numbers, rows, columns, colour) {
  Object.assign(canvas, { width: columns, height: rows });
  const image = new ImageData(columns, rows);
  numbers.forEach((value, n) => value !== null && image.data.set([...colour(value), 255], 4 * n));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// A canvas whose pixels stay square and sharp however large it is shown.
export const createPixelCanvas = (attributes) => el("canvas", { ...attributes, class: ["pixels", attributes?.class].filter(Boolean).join(" ") });

// The codes of the mean over the first axis of codes (h, rows, columns).
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
