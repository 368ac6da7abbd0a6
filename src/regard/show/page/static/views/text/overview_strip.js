// A strip next to a long text: the shaded text as a whole, with a frame around the visible part.

import { readBackground } from "../../drawing/color.js";

export function createOverview(app, text) {
  const canvas = app.el("canvas", { class: "strip", "aria-hidden": "true", title: "Overview of the text: click to scroll" });
  let shading = null; // {codes, quantity, paint}

  function draw() {
    const { clientWidth: width, clientHeight: height } = canvas;
    const [from, share] = text.share();
    canvas.classList.toggle("needless", share >= 1);
    if (!width || !height || share >= 1) return;
    Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    if (shading) context.putImageData(rows(width, height), 0, 0);
    context.strokeStyle = readBackground("--accent");
    context.lineWidth = 2;
    context.strokeRect(1, from * height + 1, width - 2, Math.max(share * height - 2, 4));
  }

  // Return an image with a line of pixels for each range of words, colored by the largest number in the range.
  function rows(width, height) {
    const { codes, quantity, paint } = shading;
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    for (let y = 0; y < height; y++) {
      const [from, to] = [Math.floor((y * codes.length) / height), Math.max(Math.floor(((y + 1) * codes.length) / height), Math.floor((y * codes.length) / height) + 1)];
      pixels.fill(paint(quantity.pool(codes, from, to)), y * width, (y + 1) * width);
    }
    return image;
  }

  const go = (event) => event.buttons & 1 && text.scrollTo((event.clientY - canvas.getBoundingClientRect().top) / canvas.clientHeight);
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    go(event);
  });
  canvas.addEventListener("pointermove", go);

  return {
    element: canvas,
    draw,
    shade(codes, quantity, paint) {
      shading = codes && { codes, quantity, paint };
      draw();
    },
  };
}
