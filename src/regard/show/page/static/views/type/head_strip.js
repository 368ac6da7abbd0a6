// The heads of a layer in Type: a small picture of each head and of their mean, and a large one of the selected head.

import { el } from "../../drawing/elements.js";
import { paintCodes, createPixelCanvas } from "../../drawing/matrix_image.js";
import { AXES, renderBareWord } from "../../drawing/words.js";

const [WORDS, MANY] = [40, 24]; // maximum number of words along an axis, and of a picture that is small

export function createHeadStrip() {
  const canvas = createPixelCanvas({ class: "type-picture", role: "img" });
  const mark = el("div", { class: "type-row" });
  const frame = el("a", { class: "type-frame" }, canvas, mark);
  const [rows, columns] = ["type-rows", "type-columns"].map((name) => el("div", { class: name, "aria-hidden": "true" }));
  const plot = el("div", { class: "type-plot" }, columns, rows, frame);
  const strip = el("div", { class: "type-heads", role: "group", "aria-label": "Heads" });
  const title = el("h2", {}, "Heads of the layer");
  const alike = el("p", { class: "note" }, "Each head has its own weights; the mean is over all heads.");
  const axes = el("figcaption", { class: "note" });
  const section = el("section", { class: "type-strip", "aria-label": "Heads of the layer" }, title, alike, strip);
  const figure = el("figure", { class: "type-figure" }, axes, plot);

  // Write the words along both axes, if they fit.
  function label(words, asking) {
    const roomy = Math.max(words.length, asking.length) <= WORDS;
    plot.classList.toggle("type-roomy", roomy);
    plot.classList.toggle("type-many", Math.max(words.length, asking.length) > MANY);
    rows.replaceChildren(...(roomy ? asking.map(renderBareWord) : []));
    columns.replaceChildren(...(roomy ? words.map(renderBareWord) : []));
  }

  // Draw the pictures {codes, shape} of a quantity in its colors; `share` is the position of the query from 0 to 1.
  function set({ codes, shape: [h, rows, columns] }, { selected, off, share, layer, choose, quantity, scale }) {
    const paint = quantity.paint(scale);
    const one = (n) => codes.subarray(n * rows * columns, (n + 1) * rows * columns);
    const mean = (heads) => (heads.length === 1 ? one(heads[0]) : quantity.average(joinArrays(heads.map(one)), [heads.length, rows, columns]));
    const all = Array.from({ length: h }, (_, n) => n);
    const getCodes = (n) => (n === null ? mean(all) : one(n));
    const isMean = selected.length === h;
    const isOff = (n) => n !== null && off.includes(`${layer}.${n}`);
    const drawHead = (n) => el("button", { class: isOff(n) ? "type-head type-off" : "type-head", "aria-pressed": String(n === null ? isMean : !isMean && selected.includes(n)), "aria-label": n === null ? "mean of all heads" : `head ${n}${isOff(n) ? ", switched off" : ""}`, onclick: () => choose(n) },
      paintCodes(createPixelCanvas(), getCodes(n), rows, columns, paint), el("span", { class: "numbers" }, n === null ? "mean" : n));
    const focused = strip.contains(document.activeElement);
    strip.replaceChildren(...(h === 1 ? [null] : [null, ...all]).map(drawHead));
    alike.hidden = strip.hidden = h === 1; // the only head has the large picture
    title.textContent = h === 1 ? "The head of the layer" : "Heads of the layer";
    axes.textContent = `Rows look, columns are looked at${scale.name === "log" ? " (colors: log scale)" : ""}.`;
    if (focused) strip.querySelector("[aria-pressed=true]").focus();
    paintCodes(canvas, mean(selected), rows, columns, paint);
    canvas.setAttribute("aria-label", `${quantity.noun}, layer ${layer}, ${selected.length > 1 ? `mean of ${selected.length} heads` : `head ${selected[0]}`}: ${AXES}`);
    Object.assign(mark.style, { top: `${100 * share}%`, height: `${Math.max(100 / rows, 1)}%` });
  }

  return { strip: section, figure, set, label, lead: (href) => frame.setAttribute("href", href) };
}

// Join typed arrays of one kind.
function joinArrays(parts) {
  const joined = new parts[0].constructor(parts.reduce((sum, { length }) => sum + length, 0));
  parts.reduce((at, part) => (joined.set(part, at), at + part.length), 0);
  return joined;
}
