// Compare: two heads, prompts or recordings side by side, and what is more or less in the second.

import { numberOf, placed } from "../bar.js";
import { three } from "../codes.js";
import * as colour from "../colour.js";
import { el } from "../el.js";
import { legend, ofDifferences, ofWeights } from "../legend.js";
import { difference, furthest, levelOf, moved, picture, shared } from "../pair.js";
import { paintNumbers, pixels } from "../picture.js";
import { plain, quoted, shown } from "../words.js";
import { likeness } from "./likeness.js";

const LISTED = 6; // of the places that differ most
const WORDS = 24; // columns whose words have room along a picture

export const view = { name: "compare", title: "Compare", question: "What is different?", bar: ["scale"], mount };

function mount(stage, app) {
  const page = skeleton(app, { change, typed, pin: (q, k) => app.go({ q, k }, { replace: true }), swap });
  stage.append(page.root);
  const kept = new Map(); // pictures and words, by what they are of
  let drawn = null;
  let asking = null;

  // The two sides that a state names: {name, summary, place, layer}, the second the next head where it names none.
  function sides(state) {
    const summary = app.summary();
    const other = app.shelf().find((one) => one.id === state.r2) ?? summary;
    const heads = app.attention().layers[state.layer].heads;
    const asked = { kind: state.kind2 ?? state.kind, part: state.part2 ?? (other === summary ? state.part : null) };
    const attention = placed(other, asked);
    const layer = within(state.layer2 ?? state.layer, attention.layers.length);
    const head = within(state.head2 ?? (other === summary && layer === state.layer ? (state.head + 1) % heads : state.head), attention.layers[layer].heads);
    const second = { kind: attention.kind, part: attention.part, b: within(state.b2 ?? 0, other.batch), layer, head };
    return [
      { summary, attention: app.attention(), place: app.place(), layer: app.attention().layers[state.layer] },
      { summary: other, attention, place: second, layer: attention.layers[layer] },
    ];
  }

  async function draw(state) {
    const both = sides(state);
    page.controls(both);
    asking?.abort();
    const { signal } = (asking = new AbortController());
    const level = levelOf(...both.flatMap(({ layer }) => [layer.queries, layer.keys]));
    app.wait("Fetching the two heads");
    const parts = await Promise.all(both.map((side) => once([side.summary.id, side.place, level], () => fetched(side, level, signal))));
    if (signal.aborted) return;
    app.ready();
    const common = shared(parts[0].words, parts[1].words);
    const apart = difference(parts[0], parts[1], common, level);
    drawn = { parts, apart, common, level, both };
    render(state);
  }

  async function fetched({ summary, attention, place, layer }, level, signal) {
    const book = app.book(summary.id);
    const rows = await book.words(attention.rows, 0, layer.queries);
    const columns = await book.words(attention.columns, 0, layer.keys);
    const found = await picture(app.source, summary.id, place, layer, level, signal);
    return { ...found, of: { rows: layer.queries, columns: layer.keys }, words: { rows, columns } };
  }

  async function once(key, ask) {
    const name = JSON.stringify(key);
    if (kept.size > 12) kept.delete(kept.keys().next().value);
    if (!kept.has(name)) kept.set(name, await ask());
    return kept.get(name);
  }

  function render(state) {
    const { parts, apart, common, level } = drawn;
    const top = parts.flatMap((one) => one.weights).reduce((most, value) => Math.max(most, value ?? 0), 1e-6);
    const scale = colour.scaleOf(state, Math.max(...parts.map((one) => one.of.columns)), top);
    const high = reach(apart.weights);
    page.pictures(drawn, (value) => colour.shade(Math.min(scale.share(value), 1)), (value) => colour.difference(value / high), scale, ofReach(apart.weights, high));
    page.told(sentence(), common.said);
    page.list(level ? [] : furthest(apart, LISTED), parts);
    page.mark(drawn, state.q, state.k);
    const [a, b] = drawn.both.map(({ place, layer }) => `layer ${place.layer}, head ${numberOf(layer, place.head)}`);
    app.caption(app.el("b", {}, `${a} against ${b}`), ": rows look, columns are looked at; in the difference blue is more in the second, orange less.");
    page.exact(state.q === undefined || state.k === undefined ? null : state, exact);
  }

  function sentence() {
    const { apart, level } = drawn;
    if (!apart.rows) return "";
    const share = level ? null : moved(apart);
    if (share === null) return `Each pixel is the mean of ${2 ** level} by ${2 ** level} weights.`;
    if (share < 5e-4) return "The two attend alike.";
    return `On average ${three(share)} of a word’s attention lies elsewhere in the second (0: alike, 1: nothing in common).`;
  }

  // The weights at a place of both sides, every digit, where both have it.
  async function exact({ q, k }) {
    const cells = drawn.both.map(async ({ summary, place, layer }) => (q < layer.queries && k < layer.keys ? app.source.cell(summary.id, { ...place, q, k }) : null));
    return Promise.all(cells);
  }

  function change(side, changes) {
    const state = app.state();
    const names = side ? (name) => `${name}2` : (name) => name;
    const now = sides(state)[1].place;
    const held = side ? {} : { layer2: now.layer, head2: now.head, kind2: now.kind }; // the second stays where it is
    app.go({ ...held, ...(side ? { kind2: now.kind, layer2: now.layer, head2: now.head } : {}), ...Object.fromEntries(Object.entries(changes).map(([name, value]) => [names(name), value])), q: null, k: null }, { replace: true });
  }

  function swap() {
    const [a, b] = sides(app.state());
    const second = Object.fromEntries(Object.entries(a.place).map(([name, value]) => [`${name}2`, value]));
    app.go({ ...b.place, r: b.summary.id, ...second, r2: a.summary.id, q: null, k: null });
  }

  async function typed(text, box) {
    if (!text.trim()) return app.fail("Type at least one word first.", box);
    app.wait(`Running ${app.start.model}`);
    try {
      const summary = await app.source.type({ text });
      app.add(summary);
      const { layer, head } = app.state();
      app.go({ r2: summary.id, kind2: null, part2: null, b2: null, layer2: layer, head2: head, q: null, k: null });
    } catch (fault) {
      app.fail(fault.message, box);
    } finally {
      app.ready();
    }
  }

  const step = (rows, columns) => () => {
    const { q = 0, k = 0 } = app.state();
    if (!drawn) return;
    const [queries, keys] = ["rows", "columns"].map((axis) => Math.max(...drawn.parts.map((one) => one.of[axis])));
    app.go({ q: within(q + rows, queries), k: within(k + columns, keys) }, { replace: true });
  };
  const turn = (by) => () => {
    const { place, layer } = sides(app.state())[1];
    change(1, { head: within(place.head + by, layer.heads) });
  };
  const keys = [
    ["ArrowUp", "the query before", step(-1, 0)],
    ["ArrowDown", "the next query", step(1, 0)],
    ["ArrowLeft", "the key before", step(0, -1)],
    ["ArrowRight", "the next key", step(0, 1)],
    ["}", "the next head, of the second", turn(1)],
    ["{", "the head before, of the second", turn(-1)],
    ["x", "change sides", swap],
  ];
  return { draw, leave: () => asking?.abort(), keys, picture: () => drawn && { svg: page.sheet() } };
}

// The difference that has the full colour: few pixels are further from 0, and these do not pale all others.
function reach(weights) {
  const sizes = weights.filter((value) => value).map(Math.abs).sort((a, b) => a - b);
  return colour.round(Math.max(sizes[Math.floor(0.99 * sizes.length)] ?? 0, 1e-6));
}

function ofReach(weights, high) {
  const marks = ofDifferences(high);
  if (!weights.some((value) => Math.abs(value ?? 0) > high)) return marks;
  return { ...marks, ticks: marks.ticks.map(([place, text]) => [place, place === 0.5 ? text : place ? `${text} or more` : `${text} or less`]) };
}

const within = (value, count) => Math.min(Math.max(Math.trunc(Number(value)) || 0, 0), Math.max(count - 1, 0));

// What stands on the page from the first, and how its parts are set.
function skeleton(app, { change, typed, pin, swap }) {
  const panes = ["first", "second", "second − first"].map((name) => pane(name));
  const told = el("p", { class: "compare-told", "aria-live": "polite" });
  const note = el("p", { class: "note" });
  const read = el("p", { class: "compare-read numbers", "aria-live": "polite" });
  const list = el("div", { class: "compare-list" });
  const box = el("input", { type: "text", "aria-label": "Another text for the second side", placeholder: "another text, and Enter" });
  const form = el("form", { class: "compare-typed", hidden: !app.start.model, onsubmit: (event) => {
    event.preventDefault();
    typed(box.value, form);
  } }, box);
  const swapper = el("button", { class: "compare-swap", title: "Change sides (x)", "aria-label": "Change sides", onclick: swap }, "⇄");
  panes[1].picks.after(form);
  panes[2].shelf.append(swapper);
  const root = el("div", { class: "compare-page" }, told, note, read, el("div", { class: "compare-panes" }, panes.map((one) => one.root)), list);
  let now = null;

  panes.forEach(({ frame }) => {
    const at = (event) => {
      const [rows, columns] = [Number(frame.dataset.rows), Number(frame.dataset.columns)];
      const box = frame.getBoundingClientRect();
      const [i, j] = [Math.floor(((event.clientY - box.top) / box.height) * rows), Math.floor(((event.clientX - box.left) / box.width) * columns)];
      return i >= 0 && j >= 0 && i < rows && j < columns ? [i, j] : null;
    };
    frame.addEventListener("pointermove", (event) => {
      const place = at(event);
      if (place && now) point(...place);
    });
    frame.addEventListener("pointerleave", () => now && point(...(now.pinned ?? [null])));
    frame.addEventListener("click", (event) => {
      const place = at(event);
      if (place && now) pin(...place.map((one) => one * 2 ** now.level));
    });
  });

  // Marks a cell in all three, and says what it holds.
  function point(i, j) {
    for (const [n, { mark, canvas }] of panes.entries()) {
      const { rows, columns } = [...now.parts, now.apart][n];
      mark.hidden = i === null || i === undefined || i >= rows || j >= columns;
      if (!mark.hidden) Object.assign(mark.style, { left: `${(100 * j) / columns}%`, top: `${(100 * i) / rows}%`, width: `${100 / columns}%`, height: `${100 / rows}%` });
      canvas.dataset.row = i ?? "";
    }
    if (i === null || i === undefined) return read.replaceChildren("Point at a weight to read it in both.");
    const [a, b] = now.parts.map((one) => (i < one.rows && j < one.columns ? one.weights[i * one.columns + j] : null));
    const inside = i < now.apart.rows && j < now.apart.columns && (a !== null || b !== null);
    read.replaceChildren(...where(i, j), value("first", a), value("second", b), inside ? value("difference", (b ?? 0) - (a ?? 0), true) : "");
  }

  function where(i, j) {
    const size = 2 ** now.level;
    const name = (axis, n) => {
      const words = now.parts.map((one) => one.words[axis]);
      const from = n * size;
      if (size > 1) return `${quoted(words[0][from] ?? words[1][from])} to ${quoted(words[0][from + size - 1] ?? words[0].at(-1))}`;
      const [a, b] = words.map((some) => some[from]);
      return a === undefined || b === undefined || a === b ? quoted(a ?? b) : `${quoted(a)} or ${quoted(b)}`;
    };
    return [el("b", {}, `${name("rows", i)} → ${name("columns", j)}`)];
  }

  const value = (name, number, signed) => el("span", {}, `${name} `, el("b", {}, number === null ? "not visible" : `${signed && number > 0 ? "+" : ""}${three(number)}`));

  return {
    root,
    controls(both) {
      both.forEach((side, n) => panes[n].set(app, side, (changes) => change(n, changes)));
    },
    pictures(drawn, shade, differ, scale, marks) {
      now = { ...drawn, pinned: null };
      drawn.parts.forEach((one, n) => panes[n].draw(one, shade, one.words, drawn.level, legend(ofWeights(scale))));
      panes[2].root.hidden = !drawn.apart.rows;
      if (drawn.apart.rows) panes[2].draw(drawn.apart, differ, drawn.parts[0].words, drawn.level, legend(marks));
    },
    mark(drawn, q, k) {
      if (q !== undefined && k !== undefined) now.pinned = [q, k].map((one) => Math.floor(one / 2 ** drawn.level));
      point(...(now.pinned ?? [null]));
    },
    async exact(state, ask) {
      if (!state) return;
      const mine = now;
      const cells = await ask(state);
      if (now !== mine || now.level) return;
      const digits = cells.map((cell, n) => cell && el("span", { class: "note" }, `${n ? "second" : "first"}: ${cell.visible ? `${cell.weight}, rank ${cell.rank} of ${cell.of}` : "not visible"}`));
      read.append(...digits.filter(Boolean));
    },
    told(sentence, said) {
      told.textContent = sentence;
      note.textContent = said;
    },
    list(found, parts) {
      list.hidden = !found.length;
      const [a, b] = parts;
      list.replaceChildren(el("h2", {}, "Where they differ most"), el("ol", {}, found.map(([i, j, by]) =>
        el("li", {}, el("button", { class: "quiet compare-place", onclick: () => pin(i, j) },
          el("span", {}, shown(a.words.rows[i]), " → ", shown(a.words.columns[j])),
          el("span", { class: "numbers" }, `${three(a.weights[i * a.columns + j] ?? 0)} → ${three(b.weights[i * b.columns + j] ?? 0)}`),
          el("span", { class: "numbers" }, `${by > 0 ? "+" : ""}${three(by)}`))))));
    },
    sheet: () => likeness(panes[0].root.parentElement, "form, .compare-swap"),
  };
}

// A picture with its controls, words along it, and its legend.
function pane(name) {
  const head = el("div", { class: "compare-head" });
  const shelf = el("span", { class: "compare-shelf" });
  const picks = el("span", { class: "compare-picks" });
  head.append(el("h2", {}, name), shelf, el("div", { class: "compare-row" }, picks));
  const canvas = pixels({ role: "img", "aria-label": name });
  const mark = el("div", { class: "compare-mark", hidden: true });
  const frame = el("div", { class: "compare-frame" }, canvas, mark);
  const [rows, columns] = [el("div", { class: "compare-rows", "aria-hidden": "true" }), el("div", { class: "compare-columns", "aria-hidden": "true" })];
  const scale = el("div", { class: "compare-scale" });
  const root = el("section", { class: "compare-pane" }, head, el("div", { class: "compare-plot" }, columns, rows, frame), scale);

  function set(app, { summary, attention, place, layer }, change) {
    const focused = document.activeElement?.dataset?.pick;
    const pick = (label, key, count, value, called = String) => el("label", { class: "control" }, el("span", { class: "name" }, label),
      el("select", { "data-pick": `${name} ${key}`, class: "numbers", onchange: (event) => change({ [key]: Number(event.target.value) }) },
        Array.from({ length: count }, (_, n) => el("option", { value: n, selected: n === value }, called(n)))));
    const recordings = el("select", { "data-pick": `${name} r`, "aria-label": `Recording, ${name}`, onchange: (event) => change({ r: event.target.value, kind: null, part: null, b: null }) },
      app.shelf().map((one) => el("option", { value: one.id, selected: one.id === summary.id }, `${one.model}: ${plain(one.text, 40)}`)));
    shelf.replaceChildren(...(app.shelf().length > 1 ? [recordings] : []));
    picks.replaceChildren(pick("layer", "layer", attention.layers.length, place.layer), pick("head", "head", layer.heads, place.head, (n) => String(numberOf(layer, n))));
    if (focused) head.querySelector(`[data-pick="${focused}"]`)?.focus();
  }

  function draw({ weights, rows: high, columns: wide }, shade, words, level, key) {
    paintNumbers(canvas, weights, high, wide, shade);
    Object.assign(frame.dataset, { rows: high, columns: wide });
    frame.style.aspectRatio = `${wide} / ${high}`;
    const roomy = !level && wide <= WORDS && high <= WORDS;
    root.classList.toggle("compare-roomy", roomy);
    rows.replaceChildren(...(roomy ? words.rows.slice(0, high).map((word) => el("span", {}, bare(word))) : []));
    columns.replaceChildren(...(roomy ? words.columns.slice(0, wide).map((word) => el("span", {}, bare(word))) : []));
    scale.replaceChildren(key);
  }

  return { root, head, shelf, picks, canvas, frame, mark, set, draw, name };
}

// A word as a label, without the space before it.
const bare = (word) => plain(word.trim() || word);
