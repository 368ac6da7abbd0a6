// Render words of a text with thin marks for spaces and line ends, and codes for other invisible characters.

import { el } from "./elements.js";
import { formatCount } from "./number_format.js";

const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{Cs}]/u; // control characters, direction marks and similar
const BYTES = /(?:\\x[0-9a-f]{2})+|\ufffd/; // what stands for a token that is a part of a character
const WHOLE = 24; // maximum number of letters of a word that is not broken at the end of a line
const JOINS = new Set(["\u200c", "\u200d"]); // these shape the letters next to them

// What the two sides of a matrix of weights are.
export const AXES = "rows look (queries), columns are looked at (keys)";

// Split a word into parts [kind, text] of the kinds text, space, end (of a line) and code (of an invisible character).
export function splitWord(word) {
  const found = [];
  for (const letter of String(word)) {
    const kind = letter === " " ? "space" : letter === "\n" ? "end" : UNSEEN.test(letter) && !JOINS.has(letter) ? "code" : "text";
    if (kind === "text" && found.at(-1)?.[0] === "text") found.at(-1)[1] += letter;
    else found.push([kind, kind === "code" ? nameCharacter(letter) : letter]);
  }
  return found;
}

const nameCharacter = (letter) => (letter === "\t" ? "⇥" : letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"));

// Format a word as one line of plain text without surrounding spaces, for canvases, labels and titles, of at most `most`
// letters.
export function formatPlainWord(word, most = Infinity) {
  const marks = { space: "\u00b7", end: "↵" }; // a dot for a word of spaces alone
  const found = splitWord(String(word).replace(/^ +(?=[^ ])|(?<=[^ ]) +$/g, "")).flatMap(([kind, text], n, all) => {
    const inside = kind === "space" && n > 0 && n < all.length - 1;
    return [...(inside ? "\u00a0" : marks[kind] ?? (kind === "code" ? `‹${text}›` : text))];
  });
  return found.length <= most ? found.join("") : found.slice(0, most - 1).join("") + "…";
}

// Quote a word for a sentence: "‘it’".
export function quoteWord(word) {
  const bare = formatPlainWord(String(word).trim() || word, 24);
  return `‘${bare}’`;
}

// Return whether a word stands at other places, too, with or without the spaces around it.
export const isTwin = (words, place) => words.some((word, other) => other !== place && word.trim() === words[place].trim());

// Quote a word of a text; the place of one that stands more than once follows it: "‘it’ at 3".
export const nameWord = (words, place) => `${quoteWord(words[place])}${isTwin(words, place) ? ` at ${formatCount(place)}` : ""}`;

// Render a word of a text; the place of one that stands more than once follows it.
export const renderNamedWord = (words, place) => [...renderWord(words[place]), isTwin(words, place) && el("small", { class: "word-place" }, ` at ${formatCount(place)}`)];

// Render a word as a label of a small picture; a single letter is not rotated.
export const renderBareWord = (word) => el("span", { class: formatPlainWord(word).length === 1 && "upright" }, formatPlainWord(word));

// Explain the marks of some words: "" if they have none.
export function explainMarks(words) {
  const found = new Set(words.flatMap((word) => splitWord(word).map(([kind]) => kind)));
  const marks = [found.has("space") && "a thin line is a space", found.has("end") && "↵ is a line end", found.has("code") && "a number in a box is a character that cannot be seen"].filter(Boolean);
  return marks.length ? `${marks.join(", ").replace(/^a/, "A")}.` : "";
}

// Explain the bytes among some words: "" if they have none.
export function explainBytes(words) {
  const found = words.map((word) => BYTES.exec(word)?.[0]).find(Boolean);
  return found ? `${found} is a part of a character, in bytes: the model has no token for all of it.` : "";
}

// Cut a text before a word, to at most `most` letters.
export const cutText = (text, most) => (text.length <= most ? text : `${text.slice(0, most).replace(/\s+\S*$/, "")} …`);

// Return whether a word has a letter or a digit.
export const hasLetters = (word) => /[\p{L}\p{N}]/u.test(word ?? "");

// Render a word of a running text with the line break that may come before it: a space at its start goes with it to the next line.
export const renderTextWord = (attributes, word, children) => [
  /^\s/.test(word) ? el("wbr") : "",
  el("span", { ...attributes, class: word.length <= WHOLE ? "word whole" : "word" }, children),
];

// Return the children of an element that shows a word, of at most `most` letters.
export function renderWord(word, most = Infinity) {
  const cut = String(word).length > most ? `${String(word).slice(0, most - 1)}…` : word;
  return splitWord(cut).map(([kind, text]) => {
    if (kind === "text") return text;
    if (kind === "space") return el("span", { class: "mark-space", title: "a space" }, " ");
    if (kind === "end") return el("span", { class: "mark-end", title: "a line end" }, "↵");
    return el("span", { class: "mark-code", title: "a character that cannot be seen" }, text);
  });
}
