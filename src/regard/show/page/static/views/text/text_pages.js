// The pages of a text: words that are measured together and start on a new line. The position of a line is exact in a measured
// page, and estimated in the others.

import { createLineBreaker } from "./line_breaks.js";

const PAGE = 2000; // words in a page

export function createTextPages(count) {
  const pages = Array.from({ length: Math.ceil(count / PAGE) }, () => ({ words: null, lines: null }));
  const lines = createLineBreaker();
  let [guess, guessed] = [12, false]; // words per line; whether that is measured
  let [height, room] = [28, null]; // height and width of a line in pixels; null before the layout

  const lineCount = (n) => pages[n].lines?.length ?? Math.ceil(Math.min(PAGE, count - n * PAGE) / guess);
  const of = (place) => Math.floor(place / PAGE);

  // Return the pixel at which a page starts.
  function top(n) {
    let before = 0;
    for (let m = 0; m < n; m++) before += lineCount(m);
    return before * height;
  }

  // Return the line of a word in its page, or -1 if the page is not measured.
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
    // Return the pixel of the line of a word, exact or estimated.
    lineAt(place) {
      const page = pages[of(place)];
      return top(of(place)) + (page.lines ? lineOf(place) : Math.floor((place % PAGE) / guess)) * height;
    },
    // Set the words of a page.
    set(n, words) {
      pages[n] = { words, lines: room === null ? null : lines.broken(words, n * PAGE, room) };
      if (!guessed && pages[n].lines) [guess, guessed] = [Math.max(1, words.length / pages[n].lines.length), true];
    },
    // Measure all pages again for another font or width.
    measure(font, high, across) {
      lines.set(font);
      [height, room] = [high, across];
      pages.forEach((page, n) => page.words && (page.lines = lines.broken(page.words, n * PAGE, room)));
    },
  };
}
