// Draw an image in faded greys, the numbers of its patches as colors over it, and outlines around the query and the selected one.

import { isDark, readBackground } from "../../drawing/color.js";
import { NONE } from "./patch_grid.js";

const OPACITY = 0.65; // of the colors over the image, as in the figures
const FADED = { light: [0.6, 102], dark: [0.55, 20] }; // factor of a grey, and what is added to it
const WEIGHTS = [0.299, 0.587, 0.114]; // of red, green and blue in lightness (ITU-R BT.601)

// Return a promise of the image of an address as [canvas in colors, canvas in faded greys] for the theme.
export async function loadImage(address) {
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = createCanvas(image.naturalWidth, image.naturalHeight);
  canvas.getContext("2d").drawImage(image, 0, 0);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const fade = (how) => fadeImage(canvas, data, how);
  return { canvas, light: fade(FADED.light), dark: fade(FADED.dark) };
}

function createCanvas(width, height) {
  return Object.assign(document.createElement("canvas"), { width, height });
}

function fadeImage({ width, height }, pixels, [factor, added]) {
  const data = new Uint8ClampedArray(pixels);
  for (let n = 0; n < data.length; n += 4) {
    const grey = WEIGHTS.reduce((sum, weight, part) => sum + weight * data[n + part], 0);
    data.fill(Math.round(factor * grey + added), n, n + 3);
  }
  const faded = createCanvas(width, height);
  faded.getContext("2d").putImageData(new ImageData(data, width, height), 0, 0);
  return faded;
}

// Draw the patches of a window on a canvas of width x height pixels of the page; colour(key) is a CSS color or null.
export function drawPatches(canvas, image, grid, { window, patch, selected }, colour, [width, height]) {
  const context = canvas.getContext("2d");
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.imageSmoothingEnabled = image.canvas.width > 64;
  context.drawImage(colour ? (isDark() ? image.dark : image.light) : image.canvas, 0, 0, width, height);
  const box = (one) => {
    const [row, column] = [Math.floor(one / grid.columns), one % grid.columns];
    const [x, y] = [(n) => Math.round(grid.xOf(n) * width), (n) => Math.round(grid.yOf(n) * height)];
    return [x(column), y(row), x(column + 1) - x(column), y(row + 1) - y(row)];
  };
  context.globalAlpha = OPACITY;
  if (colour) {
    grid.patches[window].forEach((one, key) => {
      const fill = one === NONE ? null : colour(key);
      if (fill === null) return;
      context.fillStyle = fill;
      context.fillRect(...box(one));
    });
  }
  context.globalAlpha = 1;
  if (patch !== NONE) outline(context, box(patch), readBackground("--accent"), 3);
  if (selected !== NONE && selected !== patch) outline(context, box(selected), readBackground("--ink"), 1.5);
}

function outline(context, [x, y, width, height], ink, line) {
  context.strokeStyle = ink;
  context.lineWidth = line;
  context.strokeRect(x, y, width, height);
}
