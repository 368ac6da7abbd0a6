// A picture of Compare with its controls, words and legend.

import { el } from "../../drawing/elements.js";
import { paintNumbers, createPixelCanvas } from "../../drawing/matrix_image.js";
import { formatPlainWord, renderBareWord } from "../../drawing/words.js";
import { getHeadNumber } from "../../frame/selected_word.js";

const WORDS = 24; // maximum number of rows and columns of a picture whose words stand close
const [LINE, CLOSE] = [14, 10]; // minimum pixels of a row with a word, and of one of a few rows
const MARGIN = 84; // pixels beside a picture for its words

export function createPane(name) {
  const head = el("div", { class: "compare-head" });
  const shelf = el("span", { class: "compare-shelf" });
  const picks = el("span", { class: "compare-picks" });
  head.append(el("h2", {}, name), shelf, el("div", { class: "compare-row" }, picks));
  const canvas = createPixelCanvas({ role: "img", "aria-label": name });
  const mark = el("div", { class: "compare-mark", hidden: true });
  const frame = el("div", { class: "compare-frame" }, canvas, mark);
  const [rows, columns] = [el("div", { class: "compare-rows", "aria-hidden": "true" }), el("div", { class: "compare-columns", "aria-hidden": "true" })];
  const scale = el("div", { class: "compare-scale" });
  const root = el("section", { class: "compare-pane" }, head, el("div", { class: "compare-plot" }, columns, rows, frame), scale);

  function set(app, { summary, attention, place, layer }, change) {
    const focused = document.activeElement?.dataset?.pick;
    const pick = (label, key, count, value, called = String) => el("label", { class: "control" }, el("span", { class: "name" }, label),
      el("select", { "data-pick": `${name} ${key}`, class: "numbers", onchange: (event) => change({ [key]: Number(event.target.value) }) },
        Array.from({ length: count }, (_, n) => el("option", { value: n, selected: n === value }, called(n)))));
    const recordings = el("select", { "data-pick": `${name} r`, "aria-label": `Recording, ${name}`, onchange: (event) => change({ r: event.target.value, kind: null, part: null, b: null }) },
      app.shelf().map((one) => el("option", { value: one.id, selected: one.id === summary.id }, `${one.model}: ${formatPlainWord(one.text, 40)}`)));
    shelf.replaceChildren(...(app.shelf().length > 1 ? [recordings] : []));
    picks.replaceChildren(pick("layer", "layer", attention.layers.length, place.layer), pick("head", "head", layer.heads, place.head, (n) => String(getHeadNumber(layer, n))));
    if (focused) head.querySelector(`[data-pick="${focused}"]`)?.focus();
  }

  function draw({ weights, rows: high, columns: wide }, shade, words, level, key) {
    paintNumbers(canvas, weights, high, wide, shade);
    Object.assign(frame.dataset, { rows: high, columns: wide });
    frame.style.aspectRatio = `${wide} / ${high}`;
    const room = frame.parentElement.clientWidth - MARGIN;
    const most = Math.max(Math.min(WORDS, Math.floor(room / CLOSE)), Math.floor(room / LINE));
    const roomy = !level && wide <= most && high <= most;
    root.classList.toggle("compare-roomy", roomy);
    rows.replaceChildren(...(roomy ? words.rows.slice(0, high).map(renderBareWord) : []));
    columns.replaceChildren(...(roomy ? words.columns.slice(0, wide).map(renderBareWord) : []));
    scale.replaceChildren(key);
  }

  // Mark cell i, j of a picture of rows x columns, or none.
  function point({ rows: high, columns: wide }, i, j) {
    mark.hidden = i === null || i >= high || j >= wide;
    if (!mark.hidden) Object.assign(mark.style, { left: `${(100 * j) / wide}%`, top: `${(100 * i) / high}%`, width: `${100 / wide}%`, height: `${100 / high}%` });
  }

  return { root, shelf, picks, frame, set, draw, point };
}
