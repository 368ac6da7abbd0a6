// Export the sheet of Heads as SVG: the pictures with their names, arranged as on the page.

import { readBackground } from "../../drawing/color.js";
import { createSvgPen } from "../../drawing/canvas_pen.js";

const EDGE = 16; // pixels of margin

export function exportSheet(stage) {
  const edge = stage.querySelector(".heads-sheet").getBoundingClientRect();
  const spot = (element) => {
    const { left, top, width, height } = element.getBoundingClientRect();
    return [left - edge.left + EDGE, top - edge.top + EDGE, width, height];
  };
  const wide = Math.max(...[...stage.querySelectorAll(".head")].map((head) => spot(head)[0] + spot(head)[2]), 0); // without the empty space at the right
  const pen = createSvgPen(Math.ceil(wide) + EDGE, Math.ceil(edge.height) + 2 * EDGE, readBackground("--paper"));
  for (const title of stage.querySelectorAll(".heads-layer h2")) {
    const [x, y, , height] = spot(title);
    pen.text(title.textContent, x, y + height / 2, { size: 13, fill: readBackground("--faint") });
  }
  for (const head of stage.querySelectorAll(".head")) {
    const canvas = head.querySelector("canvas");
    pen.rect(...spot(canvas), readBackground("--hidden"));
    if (canvas.width) pen.image(canvas, [0, 0, canvas.width, canvas.height], spot(canvas));
    for (const label of head.querySelectorAll("span")) {
      const [x, y, , height] = spot(label);
      pen.text(label.textContent, x, y + height / 2, { size: 12, fill: readBackground("--ink") });
    }
  }
  return pen.done();
}
