// The Text view: the words themselves; one is picked, and the others are shaded by what it looked at, or what looked at it.

import { choice, numberOf } from "../bar.js";
import { count, weight } from "../codes.js";
import { css, ink, scaleOf, shade, table } from "../colour.js";
import { ofWeights } from "../legend.js";
import { quoted } from "../words.js";
import { likeness } from "./likeness.js";
import { prose } from "./prose.js";
import { link } from "./readout.js";
import { strip } from "./strip.js";

const LINKS = 8; // strongest links listed
const SHORT = 60; // words that are set large
const EARLY = 40; // the word of a longer text that is shown before one is picked: it is in sight

export const view = {
  name: "text",
  title: "Text",
  question: "Who looks at whom?",
  bar: ["attention", "batch", "layer", "scale"],
  mount,
};

function mount(stage, app) {
  stage.classList.add("text");
  const controls = app.el("div", { class: "text-controls" });
  const panes = app.el("div", { class: "text-panes" });
  const links = app.el("aside", { class: "text-links", role: "status", "aria-label": "Strongest links" });
  stage.append(controls, panes, links);
  const at = { texts: [], hovered: null, of: "", shown: "", dressed: null, side: "rows" };
  let [asking, later] = [null, null];

  const backwards = (state) => state.way === "to";
  const chosenHeads = (state) => (state.heads ? state.heads.split(",").map(Number) : [state.head]).filter((head) => head < headCount(state));
  const headCount = (state) => app.attention().layers[state.layer].heads;

  // One text where queries and keys are the same words, two where they are not.
  function build(state) {
    at.texts.forEach(({ text }) => text.leave());
    const { rows, columns, kind } = app.attention();
    const { queries, keys } = app.attention().layers[state.layer];
    const sides = kind === "self" && rows === columns ? [["both", rows, queries]] : [["rows", rows, queries], ["columns", columns, keys]];
    at.texts = sides.map(([side, list, total]) => {
      const holder = { side };
      const label = { both: "The text", rows: "Queries: these look", columns: "Keys: these are looked at" }[side];
      holder.text = prose(app, { list, count: total, label, hover: (n) => hover(side, n), pick: (n) => pick(side, n), scrolled: () => holder.strip?.draw() });
      holder.strip = strip(app, holder.text);
      return holder;
    });
    stage.classList.toggle("short", Math.max(queries, keys) <= SHORT);
    panes.replaceChildren(...at.texts.map(({ side, text, strip: beside }) =>
      app.el("section", { class: "text-pane" }, side === "both" ? null : app.el("h2", {}, side === "rows" ? "what looks" : "what is looked at"), app.el("div", { class: "text-body" }, text.element, beside.element))));
  }

  // The word whose links are shown: the one under the pointer, else the one picked, else the last or an early one.
  function subject(state) {
    const { queries } = app.attention().layers[state.layer];
    if (at.hovered) return at.hovered;
    if (at.texts.length > 1 && backwards(state) && state.k !== undefined) return { side: "columns", place: state.k };
    return { side: at.texts.length > 1 ? "rows" : "both", place: state.q ?? (queries <= SHORT ? queries - 1 : EARLY) };
  }

  function hover(side, place) {
    at.hovered = place === null ? null : { side, place };
    shadeAll(app.state());
  }

  function pick(side, place) {
    const state = app.state();
    at.hovered = null;
    if (side === "columns") return app.go({ k: place, way: "to" });
    if (side === "rows") return app.go({ q: place, k: null, way: null });
    return app.go({ q: place === state.q ? null : place, k: null });
  }

  // Asks what the subject is linked to; only the last that was asked for is shown.
  async function shadeAll(state) {
    const { side, place } = subject(state);
    const incoming = side === "columns" || (side === "both" && backwards(state));
    const heads = chosenHeads(state);
    const name = JSON.stringify([app.summary().id, app.place(), heads, place, incoming, side]);
    if (name === at.shown) return dress(state);
    at.shown = name;
    asking?.abort();
    clearTimeout(later);
    const control = (asking = new AbortController());
    const many = heads.length > 1 || heads[0] !== state.head ? heads.join(",") : null;
    const query = { ...app.place(), [incoming ? "k" : "q"]: place, heads: many };
    app.wait(incoming ? "Adding up all weights, to know what looks at this word" : "Asking what this word looks at");
    try {
      const codes = await app.source[incoming ? "column" : "row"](app.summary().id, query, control.signal);
      if (control !== asking) return undefined;
      app.ready();
      Object.assign(at, { codes, incoming, place, side, top: codes.reduce((most, code) => Math.max(most, code), 2) });
      dress(state);
      later = setTimeout(() => strongest(query, control.signal), at.hovered ? 120 : 0);
    } catch (fault) {
      if (fault.name === "AbortError") return undefined;
      at.shown = "";
      app.ready();
      app.fail(fault.message, controls);
    }
    return undefined;
  }

  function dress(state) {
    if (!at.codes) return;
    const scale = scaleOf(state, at.codes.length, weight(at.top));
    const colours = new Map();
    const look = (n) => {
      const code = at.codes[n];
      if (code === undefined) return null;
      if (code === 0) return { hidden: true };
      const bin = Math.round(64 * Math.min(Math.max(scale.share(weight(code)), 0), 1));
      if (!colours.has(bin)) colours.set(bin, { paper: css(shade(bin / 64)), ink: ink(shade(bin / 64)) });
      return colours.get(bin);
    };
    const pixels = table(scale);
    for (const { side, text, strip: beside } of at.texts) {
      const target = side === "both" || side === (at.incoming ? "rows" : "columns");
      const source = side === at.side;
      text.dress(target ? look : null, source ? at.place : null, target && at.place === (at.incoming && side === "rows" ? state.k : state.q) && side !== "rows" ? state.k : null);
      beside.shade(target ? at.codes : null, pixels);
    }
    app.legend(ofWeights(scale));
    caption(state);
  }

  async function caption(state) {
    const heads = chosenHeads(state);
    const names = heads.map((head) => numberOf(app.attention().layers[state.layer], head));
    const which = names.length > 1 ? `mean of heads ${names.join(", ")}` : `head ${names[0]}`;
    const list = at.side === "columns" ? app.attention().columns : app.attention().rows;
    const [name, place] = [at.shown, at.place];
    const [word] = await app.words(list, place, place + 1);
    if (name !== at.shown) return;
    const told = at.incoming ? "each word is shaded by how much it looks at " : "the darker a word, the more it is looked at by ";
    app.caption(app.el("b", {}, `Layer ${state.layer}, ${which}`), ` · ${app.colour.dark() ? told.replace("darker", "brighter") : told}`, app.el("b", {}, quoted(word)), ` (place ${count(place)}, where the first is 0)`);
  }

  // The strongest links with their exact weights.
  async function strongest(query, signal) {
    try {
      const { found } = await app.source.top(app.summary().id, { ...query, n: LINKS }, signal);
      if (signal.aborted) return;
      const most = Math.max(...found.map((one) => one.weight), 1e-12);
      const list = at.side === "columns" ? app.attention().columns : app.attention().rows;
      const word = (await app.words(list, at.place, at.place + 1))[0];
      const go = (one) => app.go(at.incoming && at.texts.length > 1 ? { q: one.place } : { q: at.place, k: one.place });
      links.replaceChildren(
        app.el("h2", {}, app.el("b", {}, quoted(word)), at.incoming ? " is looked at most by" : " looks most at"),
        app.el("ol", {}, found.map((one) => app.el("li", {}, link(one, most, () => go(one))))),
      );
      app.fail("", links);
    } catch (fault) {
      if (fault.name !== "AbortError") app.fail(fault.message, links);
    }
  }

  function controlsOf(state) {
    const focused = document.activeElement?.getAttribute("data-control");
    const heads = chosenHeads(state);
    const toggle = (head) => {
      const next = heads.includes(head) ? heads.filter((one) => one !== head) : [...heads, head].sort((a, b) => a - b);
      if (next.length) app.go(next.length === 1 ? { head: next[0], heads: null } : { head: next[0], heads: next.join(",") });
    };
    const total = headCount(state);
    const all = heads.length === total;
    const chips = Array.from({ length: total }, (_, head) =>
      app.el("button", { class: "chip numbers", "data-control": `head ${head}`, "aria-pressed": String(heads.includes(head)), onclick: () => toggle(head) }, String(numberOf(app.attention().layers[state.layer], head))));
    const every = app.el("button", { class: "chip", "data-control": "head all", "aria-pressed": String(all), onclick: () => app.go({ heads: all ? null : chips.map((_, n) => n).join(",") }) }, "all");
    controls.replaceChildren(
      choice(app, "way", state.way ?? "from", [["from", "what it looks at"], ["to", "what looks at it"]], "Which way the links go"),
      app.el("span", { class: "control", role: "group", "aria-label": "Heads, several together show their mean" }, app.el("span", { class: "name" }, "heads"), app.el("span", { class: "chips" }, chips, total > 1 ? every : null)),
    );
    if (focused) controls.querySelector(`[data-control="${focused}"]`)?.focus();
  }

  function stride(next) {
    const state = app.state();
    const last = app.attention().layers[state.layer].queries - 1;
    const from = state.q ?? subject(state).place;
    at.hovered = null;
    app.go({ q: state.q === undefined ? from : Math.min(Math.max(next(from), 0), last), k: null }, { replace: true });
  }

  return {
    draw(state) {
      const name = JSON.stringify([app.summary().id, state.kind, state.part, state.layer]);
      const { queries, keys } = app.attention().layers[state.layer];
      const of = JSON.stringify([app.summary().id, state.kind, state.part, queries, keys]);
      if (of !== at.of) build(state);
      at.of = of;
      controlsOf(state);
      const to = at.texts.length > 1 ? at.texts[1] : at.texts[0];
      const asked = JSON.stringify([state.q, state.k]);
      if (asked !== at.asked && state.q !== undefined) at.texts[0].text.show(state.q);
      if (asked !== at.asked && state.k !== undefined) to.text.show(state.k);
      at.asked = asked;
      return shadeAll(state, name);
    },
    leave() {
      at.texts.forEach(({ text }) => text.leave());
      asking?.abort();
      clearTimeout(later);
    },
    keys: [
      ["ArrowLeft", "the word before", () => stride((q) => q - 1)],
      ["ArrowRight", "the next word", () => stride((q) => q + 1)],
      ["ArrowUp", "the line above", () => stride((q) => at.texts[0].text.beside(q, -1))],
      ["ArrowDown", "the line below", () => stride((q) => at.texts[0].text.beside(q, 1))],
      ["Home", "the first word", () => stride(() => 0)],
      ["End", "the last word", () => stride(() => Infinity)],
      ["w", "the other way: what looks at it", () => app.go({ way: backwards(app.state()) ? null : "to" })],
    ],
    hands: [
      ["point", "shades the links of a word"],
      ["click, tap", "keeps the word; again lets it go"],
    ],
    picture: () => ({ svg: likeness(panes) }),
  };
}
