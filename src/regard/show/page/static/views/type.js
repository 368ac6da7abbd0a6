// Type: words of one's own, what the last or the picked one of them looked at, and what the model expects next.

import { headOf } from "../bar.js";
import { weight } from "../codes.js";
import { css, ink, scale, scaleOf, round, shade, table } from "../colour.js";
import { el } from "../el.js";
import { ofWeights } from "../legend.js";
import { read } from "../link.js";
import { percent, rough } from "../numerals.js";
import { mean, paint, pixels } from "../picture.js";
import { quoted, shown } from "../words.js";
import { likeness } from "./likeness.js";

const MOST = 2000; // words shown here; Text has them all
const LINKED = 400; // letters of a text that the link holds
const WELCOME =
  "A model that reads takes words one after the other. At each it looks back at the words so far, at some more than at others: " +
  "the share that each of them gets is its attention. Write a sentence, and every word is coloured by the share it got.";

export const view = {
  name: "type",
  title: "Type",
  question: "What does it do with my words?",
  bar: (state) => (state.r ? ["attention", "layer"] : []),
  mount,
};

function mount(stage, app) {
  const page = skeleton(app, run);
  stage.append(page.root);
  let drawn = null; // of which recording the words stand
  let running = null;
  let asking = new AbortController();
  const kept = new Map(); // rows and small pictures, by what they are of

  // Runs the model on a text and shows its attention.
  async function run(text) {
    if (!text.trim()) return app.fail("Type at least one word first.", page.form);
    running?.abort();
    const { signal } = (running = new AbortController());
    app.fail("", page.form);
    page.busy(true);
    app.wait(`Running ${app.start.model}`);
    try {
      const summary = await app.source.type({ text }, signal);
      const { layer, text: before } = app.state();
      app.add(summary);
      const start = layer === 0 && !before ? middle(summary) : layer;
      app.go({ r: summary.id, view: "type", text: text.length <= LINKED ? text : null, q: null, k: null, layer: start });
    } catch (fault) {
      if (fault.name !== "AbortError") app.fail(fault.message, page.form);
    } finally {
      page.busy(false);
      app.ready();
    }
  }

  async function draw(state) {
    page.offer();
    const summary = app.summary();
    page.result.hidden = !summary;
    page.welcome.hidden = Boolean(summary);
    if (!summary) return;
    const { rows, columns, layers } = app.attention();
    const { queries, keys, heads } = layers[state.layer];
    const q = state.q ?? queries - 1;
    const one = state.of === "head";
    asking.abort();
    const { signal } = (asking = new AbortController());
    const words = await app.words(columns, 0, Math.min(keys, MOST));
    const [asks] = await app.words(rows, q, q + 1);
    if (drawn !== summary.id) {
      kept.clear();
      page.next(summary.next ?? [], (word) => go_on(word));
      drawn = summary.id;
    }
    page.words(words, keys, (n) => app.go({ q: Math.min(n, queries - 1) }, { replace: true }));
    page.picked(q, rows === columns);
    page.links(app, state);
    const place = app.place();
    const all = Array.from({ length: heads }, (_, n) => n).join();
    const [row, thumbs] = await Promise.all([
      once(`row ${JSON.stringify([place, q, one])}`, () => app.source.row(summary.id, { ...place, q, ...(one ? {} : { heads: all }) }, signal)),
      once(`thumbs ${JSON.stringify([place.kind, place.part, place.b, place.layer])}`, () => app.source.thumbs(summary.id, { ...place, head: null }, signal)),
    ]);
    if (signal.aborted) return;
    shadeWords(state, row, words, asks, keys, q);
    page.heads(thumbs, one ? state.head : null, table(scaleOf(state, keys)), q / queries, state.layer, (head) => app.go(head === null ? { of: null } : { of: "head", head }));
    const who = one ? `layer ${state.layer}, head ${headOf(app, state)}` : `layer ${state.layer}, the mean of its ${heads} heads`;
    app.caption(app.el("b", {}, quoted(asks)), ` and what it looked at: ${who}. Pick another word to ask for it.`);
  }

  async function once(key, ask) {
    if (!kept.has(key)) kept.set(key, await ask());
    return kept.get(key);
  }

  // The words in the colours of the row; the first one, on which attention often rests, does not set the scale.
  function shadeWords(state, row, words, asks, keys, q) {
    const weights = Array.from(row, weight);
    const others = weights.slice(1).filter((one) => one !== null);
    const top = Math.max(...others, others.length ? 0.01 : weights[0] ?? 1);
    const chosen = (state.scale ?? "linear") === "linear" ? scale("linear", 0, round(top)) : scaleOf(state, keys, top);
    page.shade(weights, chosen);
    const legend = ofWeights(chosen, "weight");
    if (weights[0] > chosen.high) legend.ticks.at(-1)[1] += " or more";
    app.legend(legend);
    page.told(said(weights, words, asks, q));
  }

  async function go_on(word) {
    const columns = app.attention().columns;
    const text = (await app.words(columns, 0, app.attention().layers[0].keys)).join("") + word;
    page.form.elements.text.value = text;
    run(text);
  }

  const asked = read(location.hash);
  if (asked.text) page.form.elements.text.value = asked.text;
  if (asked.text && !app.shelf().some((one) => one.id === asked.r)) run(asked.text); // the server has forgotten it
  if (!app.summary()) page.form.elements.text.focus();

  const step = (by) => () => {
    const count = app.summary() ? app.attention().layers[app.state().layer].queries : 0;
    const q = (app.state().q ?? count - 1) + by;
    if (q >= 0 && q < count) app.go({ q }, { replace: true });
  };
  const turn = (by) => () => {
    const { of, head, layer } = app.state();
    const heads = app.attention().layers[layer].heads;
    const next = (of === "head" ? head : -1) + by;
    if (next >= -1 && next < heads) app.go(next < 0 ? { of: null } : { of: "head", head: next });
  };
  const keys = [
    ["ArrowRight", "the next word", step(1)],
    ["ArrowLeft", "the word before", step(-1)],
    ["]", "the next head", turn(1)],
    ["[", "the head before; before the first the mean", turn(-1)],
    ["i", "write in the box", () => page.form.elements.text.focus()],
  ];
  const leave = () => [running, asking].forEach((one) => one?.abort());
  return { draw, leave, keys, picture: () => app.summary() && { svg: likeness(page.result) } };
}

// What a word looked at most, in a sentence.
function said(weights, words, asks, q) {
  const order = weights.map((_, n) => n).filter((n) => weights[n] > 0 && n < words.length);
  order.sort((a, b) => weights[b] - weights[a]);
  if (!order.length) return `${quoted(asks)} may see nothing.`;
  const few = order.slice(0, 3).map((n) => `${n === q ? "itself" : quoted(words[n])} (${rough(weights[n])})`);
  const list = few.length === 1 ? few[0] : `${few.slice(0, -1).join(", ")} and ${few.at(-1)}`;
  const rest = order[0] === 0 && weights[0] > 0.3 && q > 1 ? " Heads that find nothing to look at rest on the first word." : "";
  return `${quoted(asks)} looks most at ${list}.${rest}`;
}

// The layer in the middle of the first attention: the first one looks at little but neighbours.
const middle = (summary) => Math.floor(summary.attentions[0].layers.length / 2);

// What stands on the page from the first, and how its parts are set.
function skeleton(app, run) {
  const text = el("textarea", { name: "text", rows: 2, "aria-label": "Your words", placeholder: "Type a sentence, or paste a text", maxlength: app.start.limits.characters });
  const button = el("button", { class: "primary" }, "Look");
  const hint = el("span", { class: "note" }, "Enter looks, Shift and Enter begin a new line");
  const form = el("form", { class: "type-form", onsubmit: (event) => {
    event.preventDefault();
    run(text.value);
  } }, text, button);
  const offers = el("div", { class: "type-offers" }, el("span", { class: "note" }, "Or try:"), app.start.sentences.map((one) =>
    el("button", { class: "chip", onclick: () => run((text.value = one)) }, one.length > 72 ? `${one.slice(0, 70)}…` : one)));
  text.addEventListener("input", () => offer());
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") text.blur();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  const paragraph = el("div", { class: "words type-words", role: "group", "aria-label": "Words: pick one to see what it looked at" });
  const told = el("p", { class: "type-told", "aria-live": "polite" });
  const more = el("p", { class: "note" });
  const links = el("nav", { class: "type-links", "aria-label": "The same words in other views" });
  const next = el("ol", { class: "type-next" });
  const canvas = pixels({ class: "type-picture", role: "img" });
  const mark = el("div", { class: "type-row" });
  const big = el("figure", {}, el("a", { class: "type-frame" }, canvas, mark), el("figcaption", { class: "note" }, "a row for each word that looks, a column for each it looks at"));
  const strip = el("div", { class: "type-heads", role: "group", "aria-label": "Heads" });
  const heads = el("section", {}, el("h2", {}, "Its heads"), el("p", { class: "note" }, "Each looks in its own way; the mean is all of them together."), strip);
  const expects = el("section", {}, el("h2", {}, "What it expects after the last word"), next);
  const result = el("div", { class: "type-result", hidden: true },
    el("section", { class: "type-read" }, paragraph, told, more, links, expects),
    el("aside", { class: "type-side" }, heads, big));
  const welcome = el("p", { class: "type-welcome" }, WELCOME);
  const root = el("div", { class: "type-page" }, el("div", { class: "type-ask" }, form, hint, offers), welcome, result);
  const offer = () => {
    offers.hidden = text.value.trim() !== "";
    hint.hidden = !offers.hidden;
  };

  let standing = null;
  paragraph.addEventListener("click", (event) => {
    const word = event.target.closest("[data-n]");
    if (word) standing.pick(Number(word.dataset.n));
  });
  paragraph.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.target.closest("[data-n]")?.click();
  });

  return {
    root,
    form,
    result,
    welcome,
    offer,
    busy(now) {
      button.disabled = now;
      root.setAttribute("aria-busy", String(now));
    },
    words(words, count, pick) {
      if (standing?.words !== words && standing?.words.join("\0") !== words.join("\0"))
        paragraph.replaceChildren(...words.map((word, n) => [el("span", { class: "word", role: "button", tabindex: -1, "data-n": n }, shown(word)), word.includes("\n") ? el("br") : ""]).flat());
      standing = { words, pick };
      more.textContent = count > words.length ? `The first ${words.length} of ${count} words; Text has all of them.` : "";
    },
    picked(q, same) {
      paragraph.querySelector("[aria-pressed]")?.removeAttribute("aria-pressed");
      paragraph.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
      const word = same && paragraph.querySelector(`[data-n="${q}"]`);
      if (!word) return;
      const focused = paragraph.contains(document.activeElement);
      word.setAttribute("aria-pressed", "true");
      word.setAttribute("tabindex", "0");
      if (focused) word.focus();
      const [top, bottom] = [word.offsetTop - paragraph.offsetTop, word.offsetTop - paragraph.offsetTop + word.offsetHeight];
      if (top < paragraph.scrollTop) paragraph.scrollTop = top - 8;
      else if (bottom > paragraph.scrollTop + paragraph.clientHeight) paragraph.scrollTop = bottom + 8 - paragraph.clientHeight;
    },
    shade(weights, chosen) {
      for (const word of paragraph.querySelectorAll("[data-n]")) {
        const value = weights[Number(word.dataset.n)];
        const colour = value === null || value === undefined ? null : shade(chosen.share(value));
        word.style.backgroundColor = colour ? css(colour) : "";
        word.style.color = colour ? ink(colour) : "";
        word.classList.toggle("type-unseen", !colour);
        word.title = colour ? `weight ${value.toPrecision(3)}` : "not visible from the picked word";
      }
    },
    told: (sentence) => (told.textContent = sentence),
    next(words, go) {
      expects.hidden = !words.length;
      const top = words[0]?.probability ?? 1;
      next.replaceChildren(...words.map(({ word, probability }) =>
        el("li", {}, el("button", { class: "quiet type-expected", title: "Go on with this word", onclick: () => go(word) },
          el("span", { class: "type-word" }, shown(word)),
          el("span", { class: "type-track" }, el("span", { style: { width: `${(100 * probability) / top}%` } })),
          el("span", { class: "numbers" }, percent(probability))))));
    },
    links(app, state) {
      const q = state.q ?? null;
      const named = [["text", "Read in Text"], ["heads", "all Heads"], ["map", "Map"], ["steps", "Steps"]];
      links.replaceChildren(...named.map(([name, said]) => el("a", { class: "button", href: app.link({ view: name, r: state.r, q, text: null }) }, said)));
      big.firstChild.setAttribute("href", app.link({ view: "map", r: state.r, text: null }));
    },
    heads(thumbs, head, colours, share, layer, choose) {
      const [h, rows, columns] = thumbs.shape;
      const of = (n) => (n === null ? mean(thumbs.codes, thumbs.shape) : thumbs.codes.subarray(n * rows * columns, (n + 1) * rows * columns));
      const focused = strip.contains(document.activeElement);
      strip.replaceChildren(...[null, ...Array.from({ length: h }, (_, n) => n)].map((n) =>
        el("button", { class: "type-head", "aria-pressed": String(n === head), "aria-label": n === null ? "the mean of all heads" : `head ${n}`, onclick: () => choose(n) },
          paint(pixels(), of(n), rows, columns, colours), el("span", { class: "numbers" }, n === null ? "mean" : n))));
      if (focused) strip.querySelector("[aria-pressed=true]").focus();
      paint(canvas, of(head), rows, columns, colours);
      canvas.setAttribute("aria-label", `Layer ${layer}, ${head === null ? "the mean of its heads" : `head ${head}`}: a row for each word that looks, a column for each it looks at`);
      Object.assign(mark.style, { top: `${100 * share}%`, height: `${Math.max(100 / rows, 1)}%` });
    },
  };
}
