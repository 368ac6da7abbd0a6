// Break words into lines by their measured widths.

import { splitWord } from "../../drawing/words.js";

export const LONGEST = 80; // maximum number of letters shown of a word

const truncateWord = (word) => (word.length > LONGEST ? `${word.slice(0, LONGEST - 1)}…` : word);

export function createLineBreaker() {
  const ruler = document.createElement("canvas").getContext("2d");
  const widths = new Map();

  function measureWord(word) {
    if (!widths.has(word)) {
      const seen = splitWord(truncateWord(word)).map(([kind, text]) => (kind === "end" ? "↵" : kind === "code" ? `‹${text}›` : text));
      widths.set(word, ruler.measureText(seen.join("")).width + 4 * seen.filter((text) => text[0] === "‹").length);
    }
    return widths.get(word);
  }

  return {
    set(font) {
      ruler.font = font;
      widths.clear();
    },
    // Break words into lines [first, last + 1] of at most `room` pixels; the first word has the index `from`, and a word that
    // ends with a line break ends its line.
    broken(words, from, room) {
      const lines = [];
      let [start, used] = [from, 0];
      words.forEach((word, n) => {
        const width = measureWord(word);
        if (used && used + width > room) {
          lines.push([start, from + n]);
          [start, used] = [from + n, 0];
        }
        used += width;
        if (word.endsWith("\n")) {
          lines.push([start, from + n + 1]);
          [start, used] = [from + n + 1, 0];
        }
      });
      if (start < from + words.length) lines.push([start, from + words.length]);
      return lines;
    },
  };
}
