// The Type view: a text of the user, the attention of one of its words, and the predicted next words.

import { roundUp, createScale, createStateScale } from "../../drawing/color.js";
import { snapshotAsSvg } from "../../drawing/svg_snapshot.js";
import { formatCount, formatTokens } from "../../drawing/number_format.js";
import { explainMarks, nameWord, quoteWord } from "../../drawing/words.js";
import { makeInitialState, isCrossText } from "../../frame/controls.js";
import { isSelectionOff, listHeadsOff, switchHeads } from "../../frame/heads_off.js";
import { readModel, setModel } from "../../frame/model_choice.js";
import { linkRequest, parseLink } from "../../frame/page_link.js";
import { chooseQuery, getSelectedHeads, nameSelectedHeads } from "../../frame/selected_word.js";
import { describeNumbers } from "./row_sentence.js";
import { buildLayout } from "./type_layout.js";

const MOST = 2000; // maximum number of words shown; Text shows all

export const view = {
  name: "type",
  title: "Type",
  question: "What does the model do with my words?",
  bar: (state) => (state.r ? ["attention", "layer", "show", "sink", "target"] : []),
  mount,
};

// `it` is the state that the functions below share: the recording of the words shown, the current run and request, and the
// cached rows and thumbnails.
function mount(stage, app) {
  const it = { app, drawn: null, running: null, asking: new AbortController(), kept: new Map() };
  it.page = buildLayout(app, (text) => runText(it, text), (word) => appendWord(it, word));
  stage.append(it.page.root);
  resumeView(it);
  const leave = () => [it.running, it.asking].forEach((one) => one?.abort());
  return { draw: (state) => drawView(it, state), leave, keys: listKeys(it), picture: () => app.summary() && { svg: snapshotAsSvg(it.page.result) }, table: () => listNumbers(it) };
}

// Run the model on the text of a link that names no recording.
function resumeView(it) {
  const { text, r, find, model } = parseLink(location.hash);
  setModel(it.page.form, model);
  const box = it.page.form.elements.text;
  if (text && !r) runText(it, (box.value = text));
  if (!it.app.summary() && !find) box.focus();
}

// Run the model on a text and show its attention.
async function runText(it, text) {
  const { app, page } = it;
  if (!text.trim()) return app.fail("Type a text first.", page.form);
  it.running?.abort();
  const { signal } = (it.running = new AbortController());
  app.fail("", page.form);
  page.busy(true);
  const model = readModel(page.form);
  app.wait(`Running ${model ?? app.start.model}`);
  try {
    const summary = await app.source.type({ text, model }, signal);
    const before = app.state();
    app.add(summary);
    app.go({ r: summary.id, view: summary.attentions.length ? "type" : "implicit", ...linkRequest(summary), q: null, k: null, at: null, token: null, off: null, find: summary.attributable ? "clearest" : null, ...chooseStart(app, summary, before) });
  } catch (fault) {
    if (fault.name !== "AbortError") app.fail(fault.message, page.form);
  } finally {
    page.busy(false);
    app.ready();
  }
  return undefined;
}

// Return the initial place in a new recording: the place in the previous one, or at first that of makeInitialState.
function chooseStart(app, summary, before) {
  const two = summary.attentions.some((one) => isCrossText(summary, one));
  if (two && before.kind !== "cross") return makeInitialState(summary);
  return parseLink(location.hash).r || before.layer > 0 ? { layer: before.layer } : makeInitialState(summary);
}

async function drawView(it, state) {
  const { app, page } = it;
  const summary = app.summary();
  page.offer();
  page.result.hidden = !summary;
  page.welcome.hidden = Boolean(summary);
  if (!summary) return;
  it.asking.abort();
  const { signal } = (it.asking = new AbortController());
  const q = chooseQuery(app, state);
  const told = await fetchWords(it, q);
  if (it.drawn !== summary.id) beginText(it, summary, told.words);
  renderWords(it, state, q, told);
  const { row, thumbs } = await fetchRow(it, state, q, signal);
  if (signal.aborted) return;
  shadeWords(it, state, { ...told, row, q });
  drawPictures(it, state, q, thumbs);
  describePicture(it, state, told.asker);
  await drawNextWords(it, state, q, told.asker, signal);
}

// Draw the tokens that are predicted after the marked one, with heads off beside those without them. A page without the model
// has those after the last token.
async function drawNextWords(it, state, q, asker, signal) {
  const { app, page } = it;
  const { queries } = app.attention().layers[state.layer];
  const own = app.summary().next ?? [];
  const off = listHeadsOff(state).join() || null;
  const canRun = own.length > 0 && !app.settings.explainModel(state);
  if (!canRun || (!off && q === queries - 1)) {
    it.nextWords = own;
    return page.next({ ...state, off: null }, own, q === queries - 1 ? asker : "the last token");
  }
  const { words } = await fetchOnce(it, `next ${q} ${off}`, () => fetchEffects(it, "ablation", { at: q, off }, signal));
  it.nextWords = off ? words : words.map(({ before, ...one }) => ({ ...one, after: undefined, probability: before }));
  return signal.aborted ? undefined : page.next(state, it.nextWords, asker);
}

// Fetch the words of the keys, those of the queries if they differ, and the name of the query.
async function fetchWords({ app }, q) {
  const { rows, columns, layers } = app.attention();
  const { queries, keys } = layers[app.state().layer];
  const words = await app.words(columns, 0, Math.min(keys, MOST));
  const asking = rows === columns ? words : await app.words(rows, 0, Math.min(queries, MOST));
  const asker = q < asking.length ? nameWord(asking, q) : `${quoteWord((await app.words(rows, q, q + 1))[0])} at ${formatCount(q)}`;
  return { words, asking, asker };
}

// Reset the view for another recording; the text field has its text: that of a link or of the server, else its words.
function beginText(it, summary, all) {
  const { text, words, model } = parseLink(location.hash);
  const box = it.page.form.elements.text;
  setModel(it.page.form, model);
  const { request } = summary;
  const given = isCrossText(summary, it.app.attention()) || it.app.unit() !== "token" || all.length === MOST ? "" : all.join("").trim();
  const read = words !== undefined || request?.tokens !== undefined ? "" : text ?? summary.typed ?? given;
  if (it.drawn || (read && (text || !box.value))) box.value = read; // what a visitor is typing already stays
  it.page.offer();
  it.kept.clear();
  it.page.next({ ...it.app.state(), off: null }, summary.next ?? [], "the last token"); // at once; others as soon as they are known
  it.drawn = summary.id;
}

function renderWords({ app, page }, state, q, { words, asking }) {
  const { rows, columns, layers } = app.attention();
  const { queries, keys } = layers[state.layer];
  const { model, notes } = app.summary();
  const marks = explainMarks(words);
  page.read(`The model ‘${model}’ read ${formatTokens(keys)}, numbered from 0${notes?.length ? `. ${notes.join(" ")}` : app.unit() === "token" ? ": words and pieces of words." : "."}${marks && ` ${marks}`}`);
  const pick = (n) => app.go({ q: Math.min(n, queries - 1) }, { replace: true });
  page.words(words, keys, rows === columns ? pick : null);
  page.written(rows === columns ? null : asking, queries, pick);
  page.picked(q, rows === columns);
  page.label(words.slice(0, keys), asking.slice(0, queries));
  page.links(app, state);
}

// Fetch the numbers of the query, of one head or the mean of all heads, and thumbnails of the heads.
async function fetchRow(it, state, q, signal) {
  const { app } = it;
  const id = app.shownId();
  const place = app.place();
  const { kind, part, b, layer } = place;
  const selected = getSelectedHeads(app, state);
  const heads = selected.length > 1 ? selected.join() : null;
  const shown = app.settings.get(state) === "weight" ? null : app.settings.query(state);
  it.asked = shown ? null : [id, "row", { ...place, q, heads }];
  const askRow = () => (shown ? fetchEffects(it, "attribution", { ...place, q, heads, ...shown }, signal) : app.source.row(id, { ...place, q, heads }, signal));
  const askThumbs = () => (shown ? fetchEffects(it, "attributionThumbs", { kind, part, b, layer, ...shown }, signal) : app.source.thumbs(id, { kind, part, b, layer }, signal));
  const [row, thumbs] = await Promise.all([
    fetchOnce(it, `row ${JSON.stringify([id, place, q, heads, shown])}`, askRow),
    fetchOnce(it, `thumbs ${JSON.stringify([id, kind, part, b, layer, shown])}`, askThumbs),
  ]);
  return { row: row.codes ?? row, thumbs };
}

// Fetch numbers for which the server may have to run the model.
async function fetchEffects({ app }, what, query, signal) {
  app.wait(`Running ${app.start.model}`);
  try {
    return await app.source[what](app.summary().id, query, signal);
  } finally {
    if (!signal.aborted) app.ready();
  }
}

async function fetchOnce({ kept }, key, ask) {
  if (!kept.has(key)) kept.set(key, await ask());
  return kept.get(key);
}

function shadeWords(it, state, { row, words, asker, q }) {
  const { app, page } = it;
  const quantity = app.settings.quantity(state);
  const numbers = Array.from(row, quantity.decode);
  const scale = quantity.name === "weight" ? chooseWeightScale(state, numbers, app.ofTwoTexts()) : quantity.makeScale(state, row.length, quantity.measure(row));
  page.shade(numbers, scale, quantity);
  it.numbers = numbers.map((value, key) => ({ query: q, key, word: words[key], [quantity.name]: value }));
  const legend = quantity.makeLegend(scale);
  if (quantity.name === "weight" && numbers[0] > scale.high) legend.ticks.at(-1)[1] += " or more";
  app.legend(legend);
  page.told(app.inUnits(describeNumbers(quantity, { numbers, words, asker, q, isTranslation: app.ofTwoTexts() })));
}

// Return the scale of weights; the first word, which often has most of the attention, does not set it.
function chooseWeightScale(state, weights, ofTwoTexts) {
  const others = weights.slice(ofTwoTexts ? 0 : 1).filter((one) => one !== null);
  const top = Math.max(...others, others.length ? 0.01 : weights[0] ?? 1);
  return (state.scale ?? "linear") === "linear" ? createScale("linear", 0, roundUp(top)) : createStateScale(state, weights.length, top);
}

function drawPictures({ app, page }, state, q, thumbs) {
  const { queries, keys } = app.attention().layers[state.layer];
  const quantity = app.settings.quantity(state);
  const choose = (n) => app.go(n === null ? { heads: "all" } : { head: n, heads: null });
  const scale = quantity.makePictureScale(state, keys, quantity.name === "weight" ? undefined : quantity.measure(thumbs.codes));
  page.heads(thumbs, { selected: getSelectedHeads(app, state), off: listHeadsOff(state), share: q / queries, layer: state.layer, choose, quantity, scale });
}

const ABOUT = { weight: "Attention of ", carried: "Carried to ", pull: "Pull through the attention of ", cut: "Change by a cut from " };

function describePicture({ app, numbers }, state, asker) {
  const hides = numbers.some((one) => one[app.settings.quantity(state).name] === null);
  const who = `layer ${state.layer}, ${app.attention().layers[state.layer].heads === 1 ? "its one head" : nameSelectedHeads(app, state)}`;
  app.caption(ABOUT[app.settings.get(state)], app.el("b", {}, asker), `: ${who}.${app.inUnits(hides ? " Gray tokens are hidden from it." : "")} ${app.inUnits("Select another token")} to see its ${app.settings.get(state) === "weight" ? "attention" : "numbers"}.`);
}

// Return the shaded numbers and those of the predicted next words as records.
async function listNumbers({ app, numbers, asked, nextWords }) {
  const exact = asked && (await app.source.exact(...asked));
  const own = (numbers ?? []).map((one, n) => (exact && one.weight !== null ? { ...one, weight: exact[n] } : one));
  return [...own, ...(nextWords ?? []).map(({ word, ...shares }) => ({ next: word, ...shares }))];
}

// Append a predicted word to the text that was typed, or else to the words, and run the model.
async function appendWord(it, word) {
  const { columns, layers } = it.app.attention();
  const text = (it.app.summary().typed ?? (await it.app.words(columns, 0, layers[0].keys)).join("")) + word;
  it.page.form.elements.text.value = text;
  runText(it, text);
}

function stepWord(it, by) {
  const { app } = it;
  const count = app.summary() ? app.attention().layers[app.state().layer].queries : 0;
  const q = count && chooseQuery(it.app, it.app.state()) + by;
  if (count && q >= 0 && q < count) app.go({ q }, { replace: true });
}

function turnHead({ app }, by) {
  const state = app.state();
  const { heads } = app.attention().layers[state.layer];
  const next = (getSelectedHeads(app, state).length > 1 ? -1 : state.head) + by;
  if (next >= -1 && next < heads) app.go(next < 0 ? { heads: "all" } : { head: next, heads: null });
}

function switchSelected({ app }) {
  const state = app.state();
  if (!app.summary() || app.settings.explainModel(state)) return;
  app.go(switchHeads(state, state.layer, getSelectedHeads(app, state), !isSelectionOff(app, state)));
}

const listKeys = (it) => [
  ["ArrowRight", "next token", () => stepWord(it, 1)],
  ["ArrowLeft", "previous token", () => stepWord(it, -1)],
  ["]", "next head", () => turnHead(it, 1)],
  ["[", "previous head; before the first, the mean", () => turnHead(it, -1)],
  ["o", "switch the selected head off, or on again", () => switchSelected(it)],
  ["i", "edit the text", () => it.page.form.elements.text.focus()],
];
