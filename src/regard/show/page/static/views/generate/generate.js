// The Generate view: words appear one by one, each with its likely alternatives; what each looked at and what moved it follow.

import { el } from "../../drawing/elements.js";
import { createQuantity } from "../../drawing/quantity.js";
import { snapshotAsSvg } from "../../drawing/svg_snapshot.js";
import { formatPercent } from "../../drawing/number_format.js";
import { quoteWord } from "../../drawing/words.js";
import { COLD, formatHeat, linkRequest } from "../../frame/page_link.js";
import { buildLayout } from "./generate_layout.js";
import { createInfluences } from "./influences.js";

const LINKED = 400; // maximum number of letters of a text in the link
const LONGEST = 2000; // maximum number of words of a prompt that are shaded

export const view = {
  name: "generate",
  title: "Generate",
  question: "Which token comes next, and where did the model look?",
  bar: (state, app) => (app?.summary()?.generated && hasSoftmax(app.summary()) ? ["show"] : []),
  mount,
};

const hasSoftmax = (summary) => summary.attentions.length > 0;

// Return the name of the list of the words that a text was written in.
const getWordList = ({ attentions, implicit }) => (attentions[0]?.rows ?? implicit[0].words);

// `it` is the state that the functions below share: the generated words as sent by the server, the prompt and the requested
// number of words; the index of the selected word, null for the last; the recording; the current run, its name on the server, and
// whether it was stopped.
function mount(stage, app) {
  const it = { app, written: [], begun: "", wanted: 0, picked: null, made: null, running: null, run: null, isStopped: false, influences: createInfluences(app) };
  it.page = buildLayout(app, { run: (asked) => runGeneration(it, asked), stop: () => stopGeneration(it), pick: (n) => pickToken(it, n) });
  stage.append(it.page.root);
  fillForm(it, app.state());
  if (!app.state().text) it.page.form.elements.text.focus();
  const leave = () => (it.running?.abort(), it.influences.leave());
  return { draw: (state) => drawView(it, state), leave, keys: listKeys(it), picture: () => it.written.length && { svg: snapshotAsSvg(it.page.body) }, table: () => listTokens(it) };
}

// Fill the form with what the link says of the prompt and of how it is continued.
const fillForm = ({ page }, { text, heat, seed, words, model, chat }) => page.set({ text, temperature: heat ?? COLD, seed: seed ?? 0, tokens: words, model, chat });

// Draw the state of the link; while the model writes, only the words that arrive are drawn.
async function drawView(it, state) {
  const summary = it.app.summary();
  if (it.running) return;
  if (!summary?.generated) return it.made && clearStory(it, state);
  if (it.made?.id !== summary.id) await loadStory(it, state, summary);
  if (it.made?.id !== summary.id) return; // another one is shown by now
  it.picked = it.written[state.word] ? state.word : null;
  showToken(it, it.picked ?? getLastIndex(it));
}

// Load what the model wrote before.
async function loadStory(it, state, summary) {
  Object.assign(it, { made: summary, written: [], picked: null, isStopped: false });
  fillForm(it, state);
  it.page.begin(state.text ?? "");
  const { text, lines } = await it.app.source.story(summary.id);
  if (it.made !== summary) return;
  Object.assign(it, { written: [], begun: text, wanted: lines.length });
  for (const line of lines) it.page.add(line, it.written.push(line) - 1);
  await endStory(it);
}

function clearStory(it, state) {
  Object.assign(it, { written: [], made: null, picked: null });
  fillForm(it, state);
  it.page.hide();
  it.app.caption();
  it.app.legend(null);
}

async function runGeneration(it, { text, tokens, temperature, seed, model, chat }) {
  const { app, page } = it;
  if (!text.trim()) return app.fail("Type a prompt first.", page.form);
  it.running?.abort();
  const mine = new AbortController();
  const name = Array.from(crypto.getRandomValues(new Uint32Array(4)), String).join("-");
  Object.assign(it, { running: mine, run: name, isStopped: false, written: [], begun: text, wanted: tokens, picked: null, made: null });
  page.begin(text);
  app.fail("", page.form);
  app.go({ ...NO_SELECTION, r: null, words: null, word: null, seed: null, text: text.length <= LINKED ? text : null, model: model ?? null, chat: chat ?? null, heat: formatHeat(temperature) });
  page.busy(true);
  try {
    for await (const line of app.source.generate({ text, tokens, temperature, seed, model, chat, run: name }, mine.signal)) {
      if (line.recording) await finishGeneration(it, line);
      else if (line.compiling) page.compiling();
      else addTokens(it, line);
    }
  } catch (fault) {
    if (fault.name !== "AbortError") app.fail(fault.message, page.form);
  } finally {
    if (it.running === mine) endRun(it, mine.signal.aborted);
    app.ready();
  }
  return undefined;
}

// Stop the text after the word that is written now: the model then reads it once. Before the first word, after the last one,
// and if it was stopped before, stop all.
function stopGeneration(it) {
  const { app, page, written, running, wanted } = it;
  if (!running || it.isStopped || !written.length || written.length >= wanted) return running?.abort();
  it.isStopped = true;
  page.count(written.length, written.length);
  return app.source.stop({ run: it.run }, running.signal).then(({ stopped }) => stopped || running.abort(), () => running.abort());
}

const NO_SELECTION = { q: null, k: null, x: null, y: null, zoom: null, at: null, token: null };

function endRun(it, isAborted) {
  it.running = null;
  it.page.busy(false);
  if (it.made) return;
  it.page.end(makeStopError(it, isAborted), null);
  it.page.finished();
  if (it.written.length) showToken(it, it.picked ?? getLastIndex(it));
}

function addTokens(it, line) {
  it.written.push(line);
  it.page.add(line, it.written.length - 1);
  it.page.count(it.written.length, it.isStopped ? it.written.length : it.wanted); // some are on their way when it is stopped
  if (it.picked === null) showToken(it, it.written.length - 1);
}

// Show a word: at once its alternatives; of a complete text also what it looked at, and then what every word did to it.
function showToken(it, n) {
  const line = it.written[n];
  if (!line) return; // its text is loading
  const isSigned = Boolean(it.made) && !hasSoftmax(it.made);
  const setting = it.made ? it.app.settings.get(it.app.state()) : "weight";
  it.page.look(line, n, { isPinned: it.picked === n, isWritten: Boolean(it.made), isStopped: !it.made && !it.running, isSigned });
  shadeLooked(it, line);
  describePicture(it, n);
  if (!it.made || isSigned) return;
  it.influences.load(it.made, line, setting, (found) => showInfluence(it, line, setting, found));
}

// Shade the words that a word looked at, in the colors of their weights; they are known once the text is complete.
function shadeLooked({ app, page, made }, { looked }) {
  if (!looked) return app.legend(null);
  if (made && app.settings.get(app.state()) !== "weight") return; // the numbers before stay until the others arrive
  const numbers = [];
  for (const { place, weight } of looked) numbers[place] = weight;
  return shadeNumbers({ app, page }, numbers, createQuantity(made && !hasSoftmax(made) ? "entry" : "weight"));
}

function shadeNumbers({ app, page }, numbers, quantity) {
  const most = numbers.reduce((top, value) => Math.max(top, Math.abs(value ?? 0)), 0);
  const scale = quantity.makeScale({ scale: "linear" }, numbers.length, most || 1);
  page.shade(numbers, scale, quantity);
  app.legend(quantity.makeLegend(scale));
}

function showInfluence(it, line, setting, { shown, moved }) {
  shadeNumbers(it, shown.numbers, createQuantity(setting, line));
  it.page.moved(line, moved, createQuantity(moved.setting, line), (place) => getWord(it, place));
}

// Return the word at a place of the text.
function getWord({ app, written, made }, place) {
  const first = written[0].place;
  return place < first ? app.word(getWordList(made), place) ?? "…" : written[place - first].word;
}

// Return the generated words with their alternatives and what they looked at as records.
const listTokens = ({ written }) => written.map(({ place, word, token, probability, likeliest, looked = [] }) => ({
  place, word, token, probability,
  alternatives: likeliest.map((one) => `${one.word}: ${one.probability}`).join("; "),
  "looked at": looked.map((one) => `${one.word} at ${one.place}: ${one.weight}`).join("; "),
}));

const getLastIndex = (it) => it.written.length - 1;

// Select a word; the selection of a complete text is in the link.
function pickWord(it, n) {
  it.picked = n;
  if (it.made) return it.app.go({ word: n }, { replace: true });
  return showToken(it, n ?? getLastIndex(it));
}

const pickToken = (it, n) => pickWord(it, it.picked === n ? null : Math.min(Math.max(n, 0), getLastIndex(it)));

function stepToken(it, by) {
  if (it.written.length) pickWord(it, Math.min(Math.max((it.picked ?? getLastIndex(it)) + by, 0), getLastIndex(it)));
}

function unpickToken(it) {
  if (it.page.isBusy()) return stopGeneration(it);
  return it.written.length ? pickWord(it, null) : undefined;
}

async function finishGeneration(it, { recording: summary, looked }) {
  looked.forEach((found, n) => (it.written[n].looked = found));
  it.made = summary;
  it.app.add(summary);
  it.running = null;
  it.page.busy(false);
  it.app.go({ r: summary.id, ...linkRequest(summary), word: it.picked, find: null }, { replace: true });
  await endStory(it);
}

// Split the prompt into its words, and lead to the other views.
async function endStory(it) {
  const { app, made, written, page } = it;
  page.finished();
  if (written.length < it.wanted) (it.isStopped ? page.stopped : page.ended)(written.length);
  const first = written[0].place;
  const words = await app.words(getWordList(made), 0, Math.min(first, LONGEST));
  if (it.made !== made) return;
  page.read(words, first);
  const links = hasSoftmax(made) ? [["text", "Read in Text"], ["heads", "All heads"], ["map", "Map"], ["steps", "Steps"]] : [["implicit", "No softmax"]];
  page.end("", links.map(([name, said]) => el("a", { class: "button", href: app.link({ view: name, r: made.id, ...NO_SELECTION }) }, said)));
}

// Return the message of a stopped run, which has no recording, with a link that opens its text in Type.
function makeStopError({ app, written, begun }, asked) {
  if (!written.length) return asked ? "Stopped before the first token." : "";
  const text = begun + written.map((one) => one.word).join("");
  return el("span", {}, asked ? "Stopped. " : "", el("a", { href: app.link({ view: "type", text: text.slice(0, LINKED), r: null, heat: null }) }, "Open this text in Type"), ".");
}

function describePicture({ app, written, picked, made }, n) {
  const { word, probability } = written[n];
  const more = !made ? "." : picked === null ? `; select a token to see ${hasSoftmax(made) ? "what it looked at and what moved it" : "what it took from the others"}.` : "; click it again to deselect it.";
  app.caption(app.el("b", {}, quoteWord(word)), ` had the probability ${formatPercent(probability)}`, more);
}

const listKeys = (it) => [
  ["ArrowRight", "next token", () => stepToken(it, 1)],
  ["ArrowLeft", "previous token", () => stepToken(it, -1)],
  ["s", "stop", () => stopGeneration(it)],
  ["i", "edit the prompt", () => it.page.form.elements.text.focus()],
  ["Escape", "stop, or deselect the token", () => unpickToken(it)],
];
