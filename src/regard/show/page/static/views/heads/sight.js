// Who sees whom in the page's model: a panel of Heads that asks when it is opened, draws what is expected and found, and says it.

import { el } from "../../drawing/el.js";
import { tells } from "../../drawing/words.js";
import { choice } from "../../frame/bar.js";
import { lead, lines, pairOf } from "./sentences.js";
import { squares } from "./squares.js";

const WHOM = [["earlier", "those before it"], ["all", "every word"]]; // whom each word is expected to see, beside itself

// `it` is what the functions below share: the parts of the panel, of which recording and rule its answer is, and the answer.
export function sight(app) {
  const said = el("p", { class: "sight-said", "aria-live": "polite" });
  const whom = el("div", { class: "control" });
  const read = el("p", { class: "sight-read", "aria-live": "polite" });
  const told = el("dl", { class: "sight-lines" });
  const it = { app, said, whom, read, told, of: "", answer: null, asking: null };
  it.squares = squares({ hover: (pair) => readPair(it, pair ?? picked(it)), pick: (q, k) => app.go({ q, k }, { replace: true }) });
  const picture = el("div", { class: "sight-picture" }, it.squares.element, read);
  it.element = el("section", { class: "sight", hidden: true, "aria-label": "Who may see whom" }, el("div", { class: "sight-head" }, said, whom), picture, told);
  return { element: it.element, draw: (state) => draw(it, state), leave: () => it.asking?.abort() };
}

// Whether a recording is of what the page's model read here, which alone can be asked.
export const examines = (summary) => Boolean(summary?.examines);

async function draw(it, state) {
  const { app } = it;
  it.element.hidden = !state.sight || !examines(app.summary());
  if (it.element.hidden) return;
  const sees = WHOM.some(([name]) => name === state.sight) ? state.sight : WHOM[0][0];
  const of = JSON.stringify([app.summary().id, sees]);
  if (of !== it.of) {
    it.of = of;
    it.whom.replaceChildren(el("span", { class: "name" }, "expected: each word sees"), choice(app, "sight", sees, WHOM, "Whom each word is expected to see"));
    await ask(it, sees);
  }
  mark(it);
}

async function ask(it, sees) {
  const { app } = it;
  it.asking?.abort();
  const { signal } = (it.asking = new AbortController());
  it.answer = null;
  it.said.classList.remove("error");
  it.said.textContent = `Asking ${app.start.model} who sees whom …`;
  try {
    const answer = await app.source.examination(app.summary().id, { sees }, signal);
    if (!signal.aborted) show(it, answer);
  } catch (fault) {
    if (fault.name === "AbortError") return;
    show(it, null);
    it.of = ""; // another look asks again
    it.said.classList.add("error");
    it.said.textContent = fault.message;
  }
}

function show(it, answer) {
  it.answer = answer;
  it.said.textContent = answer ? lead(it.app.start.model, answer) : "";
  it.told.replaceChildren(...(answer ? lines(answer) : []));
  it.squares.set(answer?.reach);
}

// The pair of the link; of what it leaves out, the first pair that should not be there, else a word and the one after it.
function picked({ app, answer }) {
  const reach = answer?.reach;
  if (!reach) return null;
  const { q, k } = app.state();
  const { length } = reach.words;
  const wrong = reach.found.flatMap((row, i) => row.flatMap((sees, j) => (sees && !reach.expected[i][j] ? [[i, j]] : [])));
  if (!(q < length) && wrong.length) return wrong[0];
  const row = q < length ? q : telling(reach.words);
  return [row, k < length ? k : Math.min(row + 1, length - 1)];
}

// A word in the middle that says something, as does the one after it.
function telling(words) {
  const middle = Math.floor((words.length - 1) / 2);
  const found = words.findIndex((word, n) => n >= middle && tells(word) && tells(words[n + 1]));
  return found < 0 ? middle : found;
}

function mark(it) {
  const pair = picked(it);
  it.squares.mark(pair);
  readPair(it, pair);
}

function readPair({ read, answer }, pair) {
  read.textContent = pair && answer?.reach ? pairOf(answer.reach, ...pair) : "";
}
