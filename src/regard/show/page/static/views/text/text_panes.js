// The texts of Text, each with its overview strip: one if queries and keys are the same words, else two.

import { el } from "../../drawing/elements.js";
import { createScrollingText } from "./scrolling_text.js";
import { createOverview } from "./overview_strip.js";

const LABELS = { both: "Text", rows: "Queries", columns: "Keys" };
const TITLES = { rows: "queries", columns: "keys" };
const OF_TWO = { rows: "translation: select a token to see its attention", columns: "source" };

// Create the texts [{side, text, strip}] in `panes`; call hover(side, place or null) and pick(side, place) for words.
export function createTextPanes(panes, app, { queries, keys }, { hover, pick }) {
  const { rows, columns, kind } = app.attention();
  const same = kind === "self" && rows === columns;
  const sides = same ? [["both", rows, queries]] : [["rows", rows, queries], ["columns", columns, keys]];
  const titles = app.ofTwoTexts() ? OF_TWO : TITLES;
  const texts = sides.map(([side, list, count]) => {
    const one = { side };
    one.text = createScrollingText(app, { list, count, label: LABELS[side], hover: (n) => hover(side, n), pick: (n) => pick(side, n), scrolled: () => one.strip?.draw() });
    one.strip = createOverview(app, one.text);
    return one;
  });
  const shown = app.ofTwoTexts() ? [...texts].reverse() : texts; // the source comes first
  panes.replaceChildren(...shown.map(({ side, text, strip: beside }) =>
    el("section", { class: "text-pane" }, titles[side] && el("h2", {}, titles[side]), el("div", { class: "text-body" }, text.element, beside.element))));
  return texts;
}
