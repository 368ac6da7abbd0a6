// Describe the largest numbers of a word's row in one sentence.

import { formatRounded } from "../../drawing/number_format.js";
import { nameWord } from "../../drawing/words.js";

// Return the sentence about a row of a quantity: {numbers, words, asker: the name of the query, q: its place, isTranslation}.
export function describeNumbers(quantity, row) {
  if (quantity.name !== "weight") return SENTENCES[quantity.name](listLargest(row, quantity.write, row.q), row.asker, quantity.of);
  return row.isTranslation ? describeColumn(row) : describeRow(row);
}

const SENTENCES = {
  carried: (found, asks) => (found ? `${asks} takes most from ${found}.` : `${asks} takes nothing from any token.`),
  pull: (found, asks, of) => (found ? `${asks} moves ${of} most by its attention to ${found}: + raises it, − lowers it.` : `${asks} does not move ${of} by its attention in this layer.`),
  cut: (found, asks, of) => (found ? `If ${asks} could not see one token, ${of} would change most for ${found}: + is a rise, − a fall.` : `Hiding a token from ${asks} in this layer would not change ${of}.`),
};

function describeRow({ numbers, words, asker, q }) {
  const found = listLargest({ numbers, words }, formatRounded, q);
  if (!found) return `${asker} has no weights: it may see nothing, or they are not numbers (NaN).`;
  const isFirst = sortBySize(numbers, words)[0] === 0 && numbers[0] > 0.3 && q > 1;
  return `${asker} attends most to ${found}.${isFirst ? " Heads that match no other token often put their attention on the first token." : ""}`;
}

// Describe the words of the source with the largest weights for a word of the translation.
function describeColumn({ numbers, words, asker }) {
  return `To write ${asker}, the model attended ${(found => (found ? `most to ${found}` : "to nothing"))(listLargest({ numbers, words }, formatRounded))}.`;
}

// List the words of the three numbers that are largest in size, or return "" if all are 0; with their places where a word stands more than once.
function listLargest({ numbers, words }, write, q) {
  const name = (n) => (n === q ? "itself" : nameWord(words, n));
  const few = sortBySize(numbers, words).map((n) => `${name(n)} (${write(numbers[n])})`);
  return few.length > 1 ? `${few.slice(0, -1).join(", ")} and ${few.at(-1)}` : few.join();
}

function sortBySize(numbers, words) {
  const order = numbers.map((_, n) => n).filter((n) => numbers[n] && n < words.length);
  return order.sort((a, b) => Math.abs(numbers[b]) - Math.abs(numbers[a])).slice(0, 3);
}
