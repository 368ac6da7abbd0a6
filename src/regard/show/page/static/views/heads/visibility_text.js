// The sentences next to the squares of who may see whom: the findings on the model, and one pair of words.

import { el } from "../../drawing/elements.js";
import { formatRounded, writeMinusSigns } from "../../drawing/number_format.js";
import { quoteWord } from "../../drawing/words.js";

// Describe the result of an examination in one sentence.
export function describeExamination(model, { sees, reach, findings }) {
  if (!reach) return `${model}: ${findings.length ? "the result is not as expected" : "nothing was found"}.`;
  const of = `${model}: of ${reach.words.length === 1 ? "this token" : `these ${reach.words.length} tokens`}`;
  const [more, less] = [1, -1].map((sign) => listWordsWith(reach, sign));
  if (more) return `${of}, ${more} ${more === 1 ? "sees" : "see"} what ${more === 1 ? "it" : "they"} may not.`;
  if (findings.length) return `${model}: the result is not as expected.`;
  if (less) return `${of}, none sees what it may not; ${less} ${less === 1 ? "shows" : "show"} no effect of some tokens that ${less === 1 ? "it" : "they"} may see.`;
  return sees === "all" ? `${of}, each sees every other.` : `${of}, none sees a later one.`;
}

// List the lines of the report: findings with their cure, checks with their sensitivity, and what could not be checked.
export function listExaminationLines({ sees, findings, checked, unknown }) {
  const line = (name, first, ...said) => [el("dt", {}, name), el("dd", {}, typeof first === "string" ? writePowers(first) : first, said)];
  const cure = (text) => el("span", { class: "note" }, text);
  const ahead = sees === "earlier" && findings.some((one) => one.kind === "future leak");
  return [
    findings.map((one) => line(one.kind, `${one.evidence}. `, cure(one.cure))),
    ahead ? line("", cure("For a model that is meant to read in both directions, such as BERT, select ‘every token’.")) : [],
    checked.map((one, n) => line(n ? "" : "checked", `${one.what}: ${one.sensitivity}`)),
    unknown.map((one, n) => line(n ? "" : "cannot tell", `${one.what}: ${one.needs}`)),
  ].flat(2);
}

// Return a text, which writes powers of ten as Python does, with those of the page: 3e-05 as 3e−5.
const writePowers = (text) => writeMinusSigns(text.replace(/(\de)\+?(-?)0*(?=\d)/g, "$1$2"));

// Describe a pair of words: whether query i may see key j, and whether it does.
export function describePair({ words, expected, found, strength }, i, j) {
  const query = `${quoteWord(words[i])} (token ${i})`;
  const key = i === j ? "itself" : `${quoteWord(words[j])} (token ${j}), which ${j > i ? "comes later" : "came before"}`;
  const [may, does] = [expected[i][j], found[i][j]];
  if (!does) return may ? `${query} may see ${key}: no effect was found.` : `${query} may not see ${key}: it does not.`;
  const far = strength[i][j] > 0.999 ? "more than any other token" : `${formatRounded(strength[i][j])} times as much as the strongest token`;
  const how = `Changing ${i === j ? "it" : quoteWord(words[j])} changes the output there ${far}.`;
  return `${query} may ${may ? "" : "not "}see ${key}: it does. ${how}`;
}

// Count the words that see a word they may not see (sign 1), or do not see a word they may see (sign -1).
function listWordsWith({ expected, found }, sign) {
  return expected.filter((row, i) => row.some((may, j) => Number(found[i][j]) - Number(may) === sign)).length;
}
