// The Generate view: words appear one by one, each with the words it attends to and the likely alternatives.

import { el } from "../../drawing/elements.js";
import { snapshotAsSvg } from "../../drawing/svg_snapshot.js";
import { formatPercent } from "../../drawing/number_format.js";
import { quoteWord } from "../../drawing/words.js";
import { buildLayout } from "./generate_layout.js";

const LINKED = 400; // maximum number of letters of a text in the link

export const view = { name: "generate", title: "Generate", question: "Which word comes next, and where did the model look?", bar: [], mount };

// `it` is the state that the functions below share: the generated words as sent by the server, the prompt and the requested
// number of words; the index of the selected word, null for the last; the recording; and the current run.
function mount(stage, app) {
  const it = { app, written: [], begun: "", wanted: 0, picked: null, made: null, running: null };
  it.page = buildLayout(app, { run: (asked) => runGeneration(it, asked), stop: () => it.running?.abort(), pick: (n) => pickToken(it, n) });
  stage.append(it.page.root);
  resumeState(it, app.state());
  return { draw() {}, leave: () => it.running?.abort(), keys: listKeys(it), picture: () => it.written.length && { svg: snapshotAsSvg(it.page.body) } };
}

// Restore the prompt and the temperature of the link.
function resumeState({ page }, state) {
  page.form.elements.text.value = state.text ?? "";
  if (state.heat) page.warm(state.heat); // not `temperature`, which is a switch of Steps
  if (!state.text) page.form.elements.text.focus();
}

async function runGeneration(it, { text, tokens, temperature, seed }) {
  const { app, page } = it;
  if (!text.trim()) return app.fail("Type a prompt first.", page.form);
  it.running?.abort();
  const mine = new AbortController();
  Object.assign(it, { running: mine, written: [], begun: text, wanted: tokens, picked: null, made: null });
  page.begin(text);
  app.fail("", page.form);
  app.go({ text: text.length <= LINKED ? text : null, heat: temperature === 1 ? null : String(temperature) }, { replace: true });
  page.busy(true);
  try {
    for await (const line of app.source.generate({ text, tokens, temperature, seed }, mine.signal)) {
      if (line.recording) finishGeneration(it, line.recording);
      else addTokens(it, line, tokens);
    }
  } catch (fault) {
    if (fault.name !== "AbortError") app.fail(fault.message, page.form);
  } finally {
    if (it.running === mine) page.busy(false);
    if (it.running === mine && !it.made) page.end(makeStopError(it, mine.signal.aborted), null);
    app.ready();
  }
  return undefined;
}

function addTokens(it, line, tokens) {
  it.written.push(line);
  it.page.add(line, it.written.length - 1);
  it.page.count(it.written.length, tokens);
  if (it.picked === null) showToken(it, it.written.length - 1);
}

function showToken(it, n) {
  it.page.look(it.written[n], n, it.picked === n);
  it.page.shade(it.written, n, it.made);
  describePicture(it, n);
}

const getLastIndex = (it) => it.written.length - 1;

function pickToken(it, n) {
  it.picked = it.picked === n ? null : Math.min(Math.max(n, 0), getLastIndex(it));
  showToken(it, it.picked ?? getLastIndex(it));
}

function stepToken(it, by) {
  if (!it.written.length) return;
  it.picked = Math.min(Math.max((it.picked ?? getLastIndex(it)) + by, 0), getLastIndex(it));
  showToken(it, it.picked);
}

function unpickToken(it) {
  if (it.page.isBusy()) return it.running.abort();
  if (!it.written.length) return undefined;
  it.picked = null;
  return showToken(it, getLastIndex(it));
}

function finishGeneration(it, summary) {
  it.made = summary;
  if (it.written.length < it.wanted) it.page.ended(it.written.length);
  it.app.add(summary);
  showToken(it, it.picked ?? getLastIndex(it));
  const links = [["text", "Read in Text"], ["heads", "all Heads"], ["map", "Map"], ["steps", "Steps"]];
  const changes = { r: summary.id, q: null, k: null, at: null, token: null, text: null, heat: null };
  it.page.end("", links.map(([name, said]) => el("a", { class: "button", href: it.app.link({ view: name, ...changes }) }, said)));
}

// Return the message of a stopped run, which has no recording, with a link that opens its text in Type.
function makeStopError({ app, written, begun }, asked) {
  if (!written.length) return asked ? "Stopped before the first word." : "";
  const text = begun + written.map((one) => one.word).join("");
  return el("span", {}, "Stopped. ", el("a", { href: app.link({ view: "type", text: text.slice(0, LINKED), r: "new" }) }, "Open this text in Type"), ".");
}

function describePicture({ app, written, picked }, n) {
  const { word, probability } = written[n];
  const more = picked === null ? "; select a word to see its attention." : "; click it again to deselect it.";
  app.caption(app.el("b", {}, quoteWord(word)), ` had the probability ${formatPercent(probability)}`, more);
}

const listKeys = (it) => [
  ["ArrowRight", "next word", () => stepToken(it, 1)],
  ["ArrowLeft", "previous word", () => stepToken(it, -1)],
  ["s", "stop", () => it.running?.abort()],
  ["i", "edit the prompt", () => it.page.form.elements.text.focus()],
  ["Escape", "stop, or deselect the word", () => unpickToken(it)],
];
