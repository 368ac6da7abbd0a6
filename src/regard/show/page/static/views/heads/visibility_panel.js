// Who may see whom in the page's model: a panel of Heads that runs regard.examine when it opens, and shows its report.

import { el } from "../../drawing/elements.js";
import { hasLetters } from "../../drawing/words.js";
import { renderChoice } from "../../frame/controls.js";
import { describeExamination, listExaminationLines, describePair } from "./visibility_text.js";
import { createSquares } from "./visibility_squares.js";

const WHOM = [["earlier", "earlier tokens"], ["all", "every token"]]; // the other tokens that each token is expected to see

// `it` is the state that the functions below share: the parts of the panel, the answer, and its recording and rule.
export function createVisibilityPanel(app) {
  const said = el("p", { class: "sight-said", "aria-live": "polite" });
  const whom = el("div", { class: "control" });
  const read = el("p", { class: "sight-read", "aria-live": "polite" });
  const told = el("dl", { class: "sight-lines" });
  const it = { app, said, whom, read, told, of: "", answer: null, asking: null };
  it.squares = createSquares({ hover: (pair) => showPair(it, pair ?? getPickedPair(it)), pick: (q, k) => app.go({ q, k }, { replace: true }) });
  const picture = el("div", { class: "sight-picture" }, it.squares.element, read);
  it.element = el("section", { class: "sight", hidden: true, "aria-label": "Who may see whom" }, el("div", { class: "sight-head" }, said, whom), picture, told);
  return { element: it.element, draw: (state) => drawPanel(it, state), leave: () => it.asking?.abort() };
}

// Return whether a recording can be examined: only one that the page's model made on this server.
export const canExamine = (summary) => Boolean(summary?.examines);

async function drawPanel(it, state) {
  const { app } = it;
  it.element.hidden = !state.sight || !canExamine(app.summary());
  if (it.element.hidden) return;
  const sees = WHOM.some(([name]) => name === state.sight) ? state.sight : WHOM[0][0];
  const of = JSON.stringify([app.summary().id, sees]);
  if (of !== it.of) {
    it.of = of;
    it.whom.replaceChildren(el("span", { class: "name" }, "expected: each token sees"), renderChoice(app, "sight", sees, WHOM, "Tokens that each token is expected to see"));
    await fetchExamination(it, sees);
  }
  markPair(it);
}

async function fetchExamination(it, sees) {
  const { app } = it;
  it.asking?.abort();
  const { signal } = (it.asking = new AbortController());
  it.answer = null;
  it.said.classList.remove("error");
  it.said.textContent = `Examining ${app.start.model} …`;
  try {
    const answer = await app.source.examination(app.summary().id, { sees }, signal);
    if (!signal.aborted) showExamination(it, answer);
  } catch (fault) {
    if (fault.name === "AbortError") return;
    showExamination(it, null);
    it.of = ""; // the next draw sends the request again
    it.said.classList.add("error");
    it.said.textContent = fault.message;
  }
}

function showExamination(it, answer) {
  it.answer = answer;
  it.said.textContent = answer ? describeExamination(it.app.start.model, answer) : "";
  it.told.replaceChildren(...(answer ? listExaminationLines(answer) : []));
  it.squares.set(answer?.reach);
}

// Return the pair of the link; by default the first pair of a leak, else a word in the middle and the next one.
function getPickedPair({ app, answer }) {
  const reach = answer?.reach;
  if (!reach) return null;
  const { q, k } = app.state();
  const { length } = reach.words;
  const wrong = reach.found.flatMap((row, i) => row.flatMap((sees, j) => (sees && !reach.expected[i][j] ? [[i, j]] : [])));
  if (!(q < length) && wrong.length) return wrong[0];
  const row = q < length ? q : findMiddleWord(reach.words);
  return [row, k < length ? k : Math.min(row + 1, length - 1)];
}

// Find a word in the middle that has letters, as has the next word.
function findMiddleWord(words) {
  const middle = Math.floor((words.length - 1) / 2);
  const found = words.findIndex((word, n) => n >= middle && hasLetters(word) && hasLetters(words[n + 1]));
  return found < 0 ? middle : found;
}

function markPair(it) {
  const pair = getPickedPair(it);
  it.squares.mark(pair);
  showPair(it, pair);
}

function showPair({ read, answer }, pair) {
  read.textContent = pair && answer?.reach ? describePair(answer.reach, ...pair) : "";
}
