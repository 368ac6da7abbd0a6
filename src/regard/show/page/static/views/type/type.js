// The Type view: a text of the user, the attention of one of its words, and the predicted next words.

import { decodeWeight } from "../../data/weight_codes.js";
import { roundUp, createScale, createStateScale, buildColorTable } from "../../drawing/color.js";
import { makeWeightScale } from "../../drawing/legend.js";
import { snapshotAsSvg } from "../../drawing/svg_snapshot.js";
import { formatCount, formatRounded } from "../../drawing/number_format.js";
import { quoteWord } from "../../drawing/words.js";
import { makeInitialState, getStateHeadNumber, isCrossText } from "../../frame/controls.js";
import { parseLink } from "../../frame/page_link.js";
import { buildLayout } from "./type_layout.js";

const MOST = 2000; // maximum number of words shown; Text shows all
const LINKED = 400; // maximum number of letters of a text in the link

export const view = {
  name: "type",
  title: "Type",
  question: "What does the model do with my words?",
  bar: (state) => (state.r ? ["attention", "layer"] : []),
  mount,
};

// `it` is the state that the functions below share: the recording of the words shown, the current run and request, and the
// cached rows and thumbnails.
function mount(stage, app) {
  const it = { app, drawn: null, running: null, asking: new AbortController(), kept: new Map() };
  it.page = buildLayout(app, (text) => runText(it, text));
  stage.append(it.page.root);
  resumeView(it);
  const leave = () => [it.running, it.asking].forEach((one) => one?.abort());
  return { draw: (state) => drawView(it, state), leave, keys: listKeys(it), picture: () => app.summary() && { svg: snapshotAsSvg(it.page.result) } };
}

// Restore the text of the link; if the server no longer has its recording, run the model again.
function resumeView(it) {
  const asked = parseLink(location.hash);
  const box = it.page.form.elements.text;
  if (asked.text) box.value = asked.text;
  if (asked.text && !it.app.shelf().some((one) => one.id === asked.r)) runText(it, asked.text);
  if (!it.app.summary()) box.focus();
}

// Run the model on a text and show its attention.
async function runText(it, text) {
  const { app, page } = it;
  if (!text.trim()) return app.fail("Type at least one word first.", page.form);
  it.running?.abort();
  const { signal } = (it.running = new AbortController());
  app.fail("", page.form);
  page.busy(true);
  app.wait(`Running ${app.start.model}`);
  try {
    const summary = await app.source.type({ text }, signal);
    const before = app.state();
    app.add(summary);
    app.go({ r: summary.id, view: "type", text: text.length <= LINKED ? text : null, q: null, k: null, at: null, token: null, ...chooseStart(app, summary, before) });
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
  return before.layer === 0 && !before.text ? { layer: makeInitialState(summary).layer } : { layer: before.layer };
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
  const q = chooseQuery(it);
  const told = await fetchWords(it, q);
  if (it.drawn !== summary.id) beginText(it, summary);
  renderWords(it, state, q, told);
  const { row, thumbs } = await fetchRow(it, state, q, signal);
  if (signal.aborted) return;
  shadeWords(it, state, { ...told, row, q });
  drawPictures(it, state, q, thumbs);
  describePicture(it, state, told.asker);
}

// Return the query: that of the link, or the last word that has letters.
function chooseQuery({ app }) {
  const { q, layer } = app.state();
  const { rows, layers } = app.attention();
  const { queries } = layers[layer];
  return q ?? app.telling(rows, queries - 1 - Number(app.ofTwoTexts() && queries > 1)); // the last token of a translation is its end token
}

// Fetch the words of the keys, those of the queries if they differ, and the word of the query.
async function fetchWords({ app }, q) {
  const { rows, columns, layers } = app.attention();
  const { queries, keys } = layers[app.state().layer];
  const words = await app.words(columns, 0, Math.min(keys, MOST));
  const asking = rows === columns ? words : await app.words(rows, 0, Math.min(queries, MOST));
  const [asker] = await app.words(rows, q, q + 1);
  return { words, asking, asker };
}

// Reset the view for another recording.
function beginText(it, summary) {
  it.kept.clear();
  it.page.next(summary.next ?? [], (word) => appendWord(it, word));
  it.drawn = summary.id;
}

function renderWords({ app, page }, state, q, { words, asking }) {
  const { rows, columns, layers } = app.attention();
  const { queries, keys } = layers[state.layer];
  const { model, notes } = app.summary();
  page.read(`${model} read ${formatCount(keys)} tokens${notes?.length ? `. ${notes.join(" ")}` : ", words and pieces of words."}`);
  const pick = (n) => app.go({ q: Math.min(n, queries - 1) }, { replace: true });
  page.words(words, keys, rows === columns ? pick : null);
  page.written(rows === columns ? null : asking, queries, pick);
  page.picked(q, rows === columns);
  page.links(app, state);
}

// Fetch the weights of the query, of one head or the mean of all heads, and thumbnails of the heads.
async function fetchRow(it, state, q, signal) {
  const { app } = it;
  const { id } = app.summary();
  const place = app.place();
  const one = state.of === "head";
  const all = Array.from({ length: app.attention().layers[state.layer].heads }, (_, n) => n).join();
  const [row, thumbs] = await Promise.all([
    fetchOnce(it, `row ${JSON.stringify([place, q, one])}`, () => app.source.row(id, { ...place, q, ...(one ? {} : { heads: all }) }, signal)),
    fetchOnce(it, `thumbs ${JSON.stringify([place.kind, place.part, place.b, place.layer])}`, () => app.source.thumbs(id, { ...place, head: null }, signal)),
  ]);
  return { row, thumbs };
}

async function fetchOnce({ kept }, key, ask) {
  if (!kept.has(key)) kept.set(key, await ask());
  return kept.get(key);
}

// Shade the words by their weights; the first word, which often has most of the attention, does not set the scale.
function shadeWords({ app, page }, state, { row, words, asker, q }) {
  const weights = Array.from(row, decodeWeight);
  const two = app.ofTwoTexts();
  const others = weights.slice(two ? 0 : 1).filter((one) => one !== null);
  const top = Math.max(...others, others.length ? 0.01 : weights[0] ?? 1);
  const linear = (state.scale ?? "linear") === "linear";
  const chosen = linear ? createScale("linear", 0, roundUp(top)) : createStateScale(state, row.length, top);
  page.shade(weights, chosen);
  const legend = makeWeightScale(chosen, "weight");
  if (weights[0] > chosen.high) legend.ticks.at(-1)[1] += " or more";
  app.legend(legend);
  page.told(two ? describeColumn(weights, words, asker) : describeRow(weights, words, asker, q));
}

function drawPictures({ app, page }, state, q, thumbs) {
  const { queries, keys } = app.attention().layers[state.layer];
  const head = state.of === "head" ? state.head : null;
  const choose = (n) => app.go(n === null ? { of: null } : { of: "head", head: n });
  page.heads(thumbs, head, buildColorTable(createStateScale(state, keys)), q / queries, state.layer, choose);
}

function describePicture({ app }, state, asker) {
  const { heads } = app.attention().layers[state.layer];
  const all = heads === 1 ? "its one head" : `mean of its ${heads} heads`;
  const who = `layer ${state.layer}, ${state.of === "head" ? `head ${getStateHeadNumber(app, state)}` : all}`;
  app.caption("Attention of ", app.el("b", {}, quoteWord(asker)), `: ${who}. Select another word to see its attention.`);
}

// Append a predicted word to the text, and run the model.
async function appendWord(it, word) {
  const { columns, layers } = it.app.attention();
  const text = (await it.app.words(columns, 0, layers[0].keys)).join("") + word;
  it.page.form.elements.text.value = text;
  runText(it, text);
}

function stepWord(it, by) {
  const { app } = it;
  const count = app.summary() ? app.attention().layers[app.state().layer].queries : 0;
  const q = count && chooseQuery(it) + by;
  if (count && q >= 0 && q < count) app.go({ q }, { replace: true });
}

function turnHead({ app }, by) {
  const { of, head, layer } = app.state();
  const { heads } = app.attention().layers[layer];
  const next = (of === "head" ? head : -1) + by;
  if (next >= -1 && next < heads) app.go(next < 0 ? { of: null } : { of: "head", head: next });
}

const listKeys = (it) => [
  ["ArrowRight", "next word", () => stepWord(it, 1)],
  ["ArrowLeft", "previous word", () => stepWord(it, -1)],
  ["]", "next head", () => turnHead(it, 1)],
  ["[", "previous head; before the first, the mean", () => turnHead(it, -1)],
  ["i", "edit the text", () => it.page.form.elements.text.focus()],
];

// Describe the largest weights of a word in a sentence.
function describeRow(weights, words, asks, q) {
  const order = sortByWeight(weights, words);
  if (!order.length) return `${quoteWord(asks)} may see nothing.`;
  const rest = order[0] === 0 && weights[0] > 0.3 && q > 1 ? " Heads that match no other word often put their attention on the first word." : "";
  return `${quoteWord(asks)} attends most to ${joinList(order.map((n) => `${n === q ? "itself" : quoteWord(words[n])} (${formatRounded(weights[n])})`))}.${rest}`;
}

// Describe the words of the source with the largest weights for a word of the translation.
function describeColumn(weights, words, wrote) {
  const found = sortByWeight(weights, words).map((n) => `${quoteWord(words[n])} (${formatRounded(weights[n])})`);
  return found.length ? `To write ${quoteWord(wrote)}, the model attended most to ${joinList(found)}.` : `To write ${quoteWord(wrote)}, the model attended to nothing.`;
}

// Return the indices of the three largest weights.
function sortByWeight(weights, words) {
  const order = weights.map((_, n) => n).filter((n) => weights[n] > 0 && n < words.length);
  return order.sort((a, b) => weights[b] - weights[a]).slice(0, 3);
}

const joinList = (few) => (few.length === 1 ? few[0] : `${few.slice(0, -1).join(", ")} and ${few.at(-1)}`);
