// The pages of a text: some thousand words each, which begin a line and are measured together; where every line stands, exactly
// where its page is measured and about so where it is not.

import { createLineBreaker } from "./line_breaks.js";

const PAGE = 2000; // words measured together

export function createTextPages(count) {
  const pages = Array.from({ length: Math.ceil(count / PAGE) }, () => ({ words: null, lines: null }));
  const lines = createLineBreaker();
  let [guess, guessed] = [12, false]; // words of a line; whether that was measured
  let [height, room] = [28, null]; // pixels of a line, down and across: none across before it is laid out

  const lineCount = (n) => pages[n].lines?.length ?? Math.ceil(Math.min(PAGE, count - n * PAGE) / guess);
  const of = (place) => Math.floor(place / PAGE);

  // The pixel where a page begins.
  function top(n) {
    let before = 0;
    for (let m = 0; m < n; m++) before += lineCount(m);
    return before * height;
  }

  // The line of a word in its page, -1 where that is not measured.
  const lineOf = (place) => pages[of(place)].lines?.findIndex(([, to]) => place < to) ?? -1;

  return {
    length: pages.length,
    of,
    top,
    lineCount,
    height: () => height,
    perLine: () => guess,
    lines: (n) => pages[n]?.lines,
    word: (place) => pages[of(place)].words[place % PAGE],
    span: (n) => [n * PAGE, Math.min((n + 1) * PAGE, count)],
    lineOf,
    // The pixel of the line of a word, as well as it is known.
    lineAt(place) {
      const page = pages[of(place)];
      return top(of(place)) + (page.lines ? lineOf(place) : Math.floor((place % PAGE) / guess)) * height;
    },
    // The words of a page have come.
    set(n, words) {
      pages[n] = { words, lines: room === null ? null : lines.broken(words, n * PAGE, room) };
      if (!guessed && pages[n].lines) [guess, guessed] = [Math.max(1, words.length / pages[n].lines.length), true];
    },
    // Measures everything again, in other letters or on other paper.
    measure(font, high, across) {
      lines.set(font);
      [height, room] = [high, across];
      pages.forEach((page, n) => page.words && (page.lines = lines.broken(page.words, n * PAGE, room)));
    },
  };
}
