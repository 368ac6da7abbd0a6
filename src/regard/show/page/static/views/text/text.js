// The Text view: the words, shaded by the weights of one selected word, as a query or as a key.

import { HIDDEN } from "../../data/weight_codes.js";
import { formatColor, chooseInk } from "../../drawing/color.js";
import { snapshotAsSvg } from "../../drawing/svg_snapshot.js";
import { formatCount } from "../../drawing/number_format.js";
import { findLargest, listStrongestLinks } from "../../drawing/strongest_links.js";
import { quoteWord } from "../../drawing/words.js";
import { chooseQuery, getSelectedHeads, isShortText, nameSelectedHeads } from "../../frame/selected_word.js";
import { renderTextControls } from "./text_controls.js";
import { createTextPanes } from "./text_panes.js";

const LINKS = 8; // number of strongest links listed
const REST = 120; // milliseconds that the pointer stays on a word before its links are listed
const BINS = 64; // number of colors of words
const NO_WEIGHTS = "it has no weights: it sees no token, or they are not numbers (NaN)";

export const view = {
  name: "text",
  title: "Text",
  question: "Which tokens attend to which?",
  bar: ["attention", "batch", "layer", "off", "show", "sink", "target", "scale"],
  mount,
};

// `it` is the state that the functions below share: the parts of the page; the texts (one if queries and keys are the same
// words, else two); the word under the pointer; the last request; and the answer shown: its codes, their word, and their
// direction.
function mount(stage, app) {
  stage.classList.add("text");
  const controls = app.el("div", { class: "text-controls" });
  const panes = app.el("div", { class: "text-panes" });
  const links = app.el("aside", { class: "text-links", "aria-live": "polite", "aria-label": "Strongest links" });
  stage.append(controls, panes, links);
  const it = { app, stage, controls, panes, links, texts: [], hovered: null, of: "", name: "", shown: null, asking: null, later: null };
  return { draw: (state) => drawView(it, state), leave: () => leaveView(it), keys: listKeys(it), hands: HANDS, picture: () => ({ svg: snapshotAsSvg(panes) }), table: () => listNumbers(it) };
}

const isBackwards = (state) => state.way === "to";
const getLayer = (it, state) => it.app.attention().layers[state.layer];
const hasTwoTexts = (it) => it.texts.length > 1;

function drawView(it, state) {
  const { app } = it;
  const { queries, keys } = getLayer(it, state);
  const of = JSON.stringify([app.summary().id, state.kind, state.part, queries, keys]);
  if (of !== it.of) buildTexts(it, state);
  it.of = of;
  renderTextControls(it.controls, app, state);
  const asked = JSON.stringify([state.q, state.k]);
  if (asked !== it.asked && state.q !== undefined) it.texts[0].text.show(state.q);
  if (asked !== it.asked && state.k !== undefined) it.texts.at(-1).text.show(state.k);
  it.asked = asked;
  return shadeTexts(it, state);
}

function buildTexts(it, state) {
  const { queries, keys } = getLayer(it, state);
  it.texts.forEach(({ text }) => text.leave());
  it.texts = createTextPanes(it.panes, it.app, { queries, keys }, { hover: (side, n) => hoverWord(it, side, n), pick: (side, n) => pickWord(it, side, n) });
  it.stage.classList.toggle("short", isShortText({ queries, keys }));
  it.stage.classList.toggle("double", hasTwoTexts(it));
}

// Return the word whose links are shown: the word under the pointer, else the selected one, else the last or an early one.
function getSubject(it, state) {
  if (it.hovered) return it.hovered;
  if (hasTwoTexts(it) && isBackwards(state) && state.k !== undefined) return { side: "columns", place: state.k };
  return { side: hasTwoTexts(it) ? "rows" : "both", place: chooseQuery(it.app, state) };
}

function hoverWord(it, side, place) {
  it.hovered = place === null ? null : { side, place };
  shadeTexts(it, it.app.state());
}

function pickWord(it, side, place) {
  const { app } = it;
  it.hovered = null;
  if (side === "columns") return app.go({ k: place, way: "to" });
  if (side === "rows") return app.go({ q: place, k: null, way: null });
  return app.go({ q: place === app.state().q ? null : place, k: null });
}

// Fetch the weights of the subject; only the answer to the last request is shown.
async function shadeTexts(it, state) {
  const { app } = it;
  const { side, place } = getSubject(it, state);
  const incoming = side === "columns" || (side === "both" && isBackwards(state));
  const heads = getSelectedHeads(app, state);
  const setting = app.settings.get(state);
  const name = JSON.stringify([app.shownId(), app.place(), heads, place, incoming, side, setting !== "weight" && app.settings.query(state)]);
  if (name === it.name) return markWords(it, state);
  it.name = name;
  it.asking?.abort();
  clearTimeout(it.later);
  const many = heads.length > 1 || heads[0] !== state.head ? heads.join(",") : null;
  return fetchCodes(it, { ...app.place(), [incoming ? "k" : "q"]: place, heads: many }, { side, place, incoming, setting, asked: JSON.stringify(app.settings.query(state)) });
}

async function fetchCodes(it, query, of) {
  const { app } = it;
  const control = (it.asking = new AbortController());
  app.wait(of.incoming ? "Computing the weights of all queries" : app.inUnits("Loading the weights of this token"));
  try {
    const codes = of.setting === "weight" ? await app.source[of.incoming ? "column" : "row"](app.shownId(), query, control.signal)
      : (await app.source.attribution(app.summary().id, { ...query, ...app.settings.query(app.state()) }, control.signal)).codes;
    if (control !== it.asking) return;
    app.ready();
    it.shown = { ...of, codes, query, id: app.shownId() };
    markWords(it, app.state());
    it.later = setTimeout(() => fetchLinks(it, query, control.signal), it.hovered ? REST : 0);
  } catch (fault) {
    if (fault.name === "AbortError") return;
    it.name = "";
    app.ready();
    app.fail(fault.message, it.controls);
  }
}

// Return the shaded numbers as records.
async function listNumbers({ app, shown }) {
  if (!shown) return [];
  const { name } = app.settings.quantity(app.state());
  const numbers = shown.setting === "weight" ? await app.source.exact(shown.id, shown.incoming ? "column" : "row", shown.query) : shown.codes;
  const { rows, columns } = app.attention();
  const words = await app.words(shown.incoming ? rows : columns, 0, shown.codes.length);
  const [asked, other] = shown.incoming ? ["key", "query"] : ["query", "key"];
  return Array.from(numbers, (number, n) => ({ [asked]: shown.place, [other]: n, word: words[n], [name]: Number.isNaN(number) ? null : number }));
}

// Shade the words and the overview strips.
function markWords(it, state) {
  const { app, shown } = it;
  if (!shown || shown.setting !== app.settings.get(state) || shown.asked !== JSON.stringify(app.settings.query(state))) return; // until the numbers arrive
  const quantity = app.settings.quantity(state);
  const scale = quantity.makeScale(state, shown.codes.length, quantity.measure(shown.codes));
  const look = computeShades(shown.codes, quantity, scale);
  const paint = quantity.paint(scale);
  for (const { side, text, strip } of it.texts) {
    const target = side === "both" || side === (shown.incoming ? "rows" : "columns");
    const linked = target && side !== "rows" && shown.place === state.q ? state.k : null;
    text.dress(target ? look : null, side === shown.side ? shown.place : null, linked);
    strip.shade(target ? shown.codes : null, quantity, paint);
  }
  app.legend(quantity.makeLegend(scale));
  describePicture(it, state);
}

// Return a function from the index of a word to its look: {paper, ink}, {hidden}, or null.
function computeShades(codes, quantity, scale) {
  const colours = new Map();
  return (n) => {
    if (codes[n] === undefined) return null;
    const value = quantity.decode(codes[n]);
    if (value === null) return { hidden: true };
    const bin = Math.round(BINS * Math.min(Math.max(scale.share(value), -1), 1));
    if (!colours.has(bin)) {
      const colour = quantity.shade({ share: () => bin / BINS }, value);
      colours.set(bin, { paper: formatColor(colour), ink: chooseInk(colour) });
    }
    return colours.get(bin);
  };
}

const getWordList = ({ app, shown }) => (shown.side === "columns" ? app.attention().columns : app.attention().rows);

async function describePicture(it, state) {
  const { app, name } = it;
  const { place, incoming } = it.shown;
  const which = nameSelectedHeads(app, state);
  const [word] = await app.words(getWordList(it), place, place + 1);
  if (name !== it.name) return;
  const quantity = app.settings.quantity(state);
  if (quantity.explain) return app.caption(app.el("b", {}, `Layer ${state.layer}, ${which}`), app.inUnits(` · each token is shaded by ${quantity.explain(incoming)} `), app.el("b", {}, quoteWord(word)), ` (token ${formatCount(place)})`);
  const told = incoming ? app.ofTwoTexts() ? "each token of the translation is shaded by its attention to " : app.inUnits("each token is shaded by how much it attends to ")
    : app.inUnits(`the ${app.colour.isDark() ? "brighter" : "darker"} a token, the more attention it receives ${app.ofTwoTexts() ? "to write " : "from "}`);
  app.caption(app.el("b", {}, `Layer ${state.layer}, ${which}`), ` · ${told}`, app.el("b", {}, quoteWord(word)), ` (token ${formatCount(place)})`, incoming || !it.shown.codes.includes(HIDDEN) ? "" : it.shown.codes.every((code) => code === HIDDEN) ? app.inUnits(`; ${NO_WEIGHTS}`) : app.inUnits("; it cannot see the gray tokens"));
}

// Fetch and list the strongest links with their exact weights.
async function fetchLinks(it, query, signal) {
  const { app, links, shown } = it;
  try {
    const quantity = app.settings.quantity(app.state());
    const list = shown.incoming ? app.attention().rows : app.attention().columns;
    const found = shown.setting === "weight" ? (await app.source.top(app.shownId(), { ...query, n: LINKS }, signal)).found
      : await findLargest(shown.codes, LINKS, async (place) => (await app.words(list, place, place + 1))[0]);
    const [word] = await app.words(getWordList(it), shown.place, shown.place + 1);
    if (signal.aborted) return;
    const go = (one) => app.go(shown.incoming && hasTwoTexts(it) ? { q: one.place } : { q: shown.place, k: one.place });
    const title = quantity.explain ? app.el("h2", {}, `Largest ${quantity.noun}: what ${shown.incoming ? "attends to " : ""}`, app.el("b", {}, quoteWord(word)), shown.incoming ? "" : " attends to")
      : app.el("h2", {}, app.el("b", {}, quoteWord(word)), shown.incoming ? " receives most attention from" : " attends most to");
    links.replaceChildren(title, listStrongestLinks(found, go, quantity));
    app.fail("", links);
  } catch (fault) {
    if (fault.name !== "AbortError") app.fail(fault.message, links);
  }
}

// Select the word next(current word); the first press selects the current word.
function stepWord(it, next) {
  const { app } = it;
  const state = app.state();
  const from = state.q ?? getSubject(it, state).place;
  const to = Math.min(Math.max(next(from), 0), getLayer(it, state).queries - 1);
  it.hovered = null;
  app.go({ q: state.q === undefined ? from : to, k: null }, { replace: true });
}

function leaveView(it) {
  it.texts.forEach(({ text }) => text.leave());
  it.asking?.abort();
  clearTimeout(it.later);
}

const listKeys = (it) => [
  ["ArrowLeft", "previous token", () => stepWord(it, (q) => q - 1)],
  ["ArrowRight", "next token", () => stepWord(it, (q) => q + 1)],
  ["ArrowUp", "line above", () => stepWord(it, (q) => it.texts[0].text.beside(q, -1))],
  ["ArrowDown", "line below", () => stepWord(it, (q) => it.texts[0].text.beside(q, 1))],
  ["Home", "first token", () => stepWord(it, () => 0)],
  ["End", "last token", () => stepWord(it, () => Infinity)],
  ["w", "change the direction", () => it.app.go({ way: isBackwards(it.app.state()) ? null : "to" })],
];

const HANDS = [
  ["hover", "show the links of a token"],
  ["click, tap", "select a token; click it again to deselect it"],
];
