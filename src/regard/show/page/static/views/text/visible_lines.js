// The rendered lines of a text, those near the window: which words are visible, and which word is above another.

import { el } from "../../drawing/elements.js";
import { renderWord } from "../../drawing/words.js";
import { LONGEST } from "./line_breaks.js";

const LONG = 24; // letters of a word that other parts of the page cut
const NEAR = 500; // pixels above and below the window in which lines are rendered

// Create the rendered lines of `pages` on a paper that a frame scrolls.
export function createVisibleLines(frame, paper, pages) {
  const standing = new Map(); // "page line" -> its element
  let [dress, selected, linked] = [null, null, null];

  function colour(span) {
    const place = Number(span.dataset.n);
    const look = dress?.(place);
    span.style.backgroundColor = look?.paper ?? "";
    span.style.color = look?.ink ?? "";
    span.classList.toggle("hidden-word", look?.hidden ?? false);
    span.classList.toggle("selected", place === selected);
    span.classList.toggle("linked", place === linked);
  }

  function line([from, to]) {
    const places = Array.from({ length: to - from }, (_, n) => from + n);
    const spans = places.map((place) => el("span", { class: "word", "data-n": place, title: pages.word(place).length > LONG && pages.word(place) }, renderWord(pages.word(place), LONGEST)));
    spans.forEach(colour);
    return el("div", { class: "prose-line" }, spans);
  }

  function put(n, m, y, kept) {
    const name = `${n} ${m}`;
    kept.add(name);
    if (!standing.has(name)) {
      standing.set(name, line(pages.lines(n)[m]));
      paper.append(standing.get(name));
    }
    standing.get(name).style.transform = `translateY(${y}px)`;
  }

  // Render the lines near the window and remove the others; call missing(n) for a page that is not loaded.
  function render(missing) {
    const [from, to] = [frame.scrollTop - NEAR, frame.scrollTop + frame.clientHeight + NEAR];
    const height = pages.height();
    const kept = new Set();
    let y = 0;
    for (let n = 0; n < pages.length; n++) {
      const tall = pages.lineCount(n) * height;
      if (y + tall >= from && y <= to) {
        if (!pages.lines(n)) missing(n);
        else for (let m = Math.max(0, Math.floor((from - y) / height)); m < pages.lineCount(n) && y + m * height <= to; m++) put(n, m, y + m * height, kept);
      }
      y += tall;
    }
    paper.style.height = `${y}px`;
    for (const [name, element] of standing) if (!kept.has(name)) element.remove(), standing.delete(name);
  }

  // Return the visible words as [first, last + 1].
  function inSight() {
    const edge = frame.getBoundingClientRect();
    const seen = [...standing.values()].filter((one) => {
      const { top, bottom } = one.getBoundingClientRect();
      return bottom > edge.top && top < edge.bottom;
    });
    const places = seen.flatMap((one) => [...one.children].map((word) => Number(word.dataset.n)));
    return places.length ? [Math.min(...places), Math.max(...places) + 1] : [0, 0];
  }

  // Return the word above or below a word, or null if that line is not rendered.
  function beside(place, by) {
    const [n, m] = [pages.of(place), pages.lineOf(place)];
    const next = m + by;
    const other = next < 0 ? [n - 1, (pages.lines(n - 1)?.length ?? 0) - 1] : next >= pages.lineCount(n) ? [n + 1, 0] : [n, next];
    const [here, there] = [`${n} ${m}`, other.join(" ")].map((name) => standing.get(name));
    if (!here || !there) return null;
    const middle = (one) => (one.getBoundingClientRect().left + one.getBoundingClientRect().right) / 2;
    const x = middle(here.querySelector(`[data-n="${place}"]`));
    const nearest = [...there.children].reduce((best, one) => (Math.abs(middle(one) - x) < Math.abs(middle(best) - x) ? one : best));
    return Number(nearest.dataset.n);
  }

  return {
    render,
    inSight,
    beside,
    all: () => [...standing.values()],
    clear() {
      for (const element of standing.values()) element.remove();
      standing.clear();
    },
    // Set the look of all words, dressing(place) -> {paper, ink, hidden}, the selected word and the word linked to it.
    dress(dressing, chosen, other) {
      [dress, selected, linked] = [dressing, chosen, other];
      for (const element of standing.values()) [...element.children].forEach(colour);
    },
  };
}
