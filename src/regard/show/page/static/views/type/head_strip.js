// The heads of a layer in Type: a small picture of each head and of their mean, and a large one of the selected head.

import { el } from "../../drawing/elements.js";
import { averageCodes, paintCodes, createPixelCanvas } from "../../drawing/matrix_image.js";

export function createHeadStrip() {
  const canvas = createPixelCanvas({ class: "type-picture", role: "img" });
  const mark = el("div", { class: "type-row" });
  const frame = el("a", { class: "type-frame" }, canvas, mark);
  const strip = el("div", { class: "type-heads", role: "group", "aria-label": "Heads" });
  const title = el("h2", {}, "Heads of the layer");
  const alike = el("p", { class: "note" }, "Each head has its own weights; the mean is over all heads.");
  const element = el("aside", { class: "type-side", "aria-label": "Heads of the layer" },
    el("section", {}, title, alike, strip),
    el("figure", {}, frame, el("figcaption", { class: "note" }, "rows are queries, columns are keys")));

  // Draw the pictures {codes, shape} in the colors of a table; `share` is the position of the query from 0 to 1.
  function set({ codes, shape }, head, colours, share, layer, choose) {
    const [h, rows, columns] = shape;
    const paint = (code) => colours[code];
    const of = (n) => (n === null ? averageCodes(codes, shape) : codes.subarray(n * rows * columns, (n + 1) * rows * columns));
    const small = (n) => el("button", { class: "type-head", "aria-pressed": String(n === head), "aria-label": n === null ? "mean of all heads" : `head ${n}`, onclick: () => choose(n) },
      paintCodes(createPixelCanvas(), of(n), rows, columns, paint), el("span", { class: "numbers" }, n === null ? "mean" : n));
    const focused = strip.contains(document.activeElement);
    strip.replaceChildren(...(h === 1 ? [null] : [null, ...Array.from({ length: h }, (_, n) => n)]).map(small));
    alike.hidden = strip.hidden = h === 1; // the only head has the large picture
    title.textContent = h === 1 ? "The head of the layer" : "Heads of the layer";
    if (focused) strip.querySelector("[aria-pressed=true]").focus();
    paintCodes(canvas, of(head), rows, columns, paint);
    canvas.setAttribute("aria-label", `Layer ${layer}, ${head === null ? "mean of its heads" : `head ${head}`}: rows are queries, columns are keys`);
    Object.assign(mark.style, { top: `${100 * share}%`, height: `${Math.max(100 / rows, 1)}%` });
  }

  return { element, set, lead: (href) => frame.setAttribute("href", href) };
}
