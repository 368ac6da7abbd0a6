// The Heads view: every layer and head as a small picture, named by its kind, sorted or filtered by what the detectors say.

import { numberOf } from "../bar.js";
import { three } from "../codes.js";
import { ground, scaleOf, table } from "../colour.js";
import { ofWeights } from "../legend.js";
import { svgPen } from "../pen.js";

const EDGE = 16; // pixels about the picture that is kept
const SENTENCES = {
  "previous token": "looks at the word before",
  itself: "looks at the word itself",
  duplicate: "looks at earlier places of the same word",
  induction: "looks at what came after the same word before",
  "first token": "looks at the first word, whatever it is",
  broad: "spreads over half of what it may see, or more",
  local: "stays near the word",
  mixed: "none of the others",
};

export const view = {
  name: "heads",
  title: "Heads",
  question: "Which of the heads is interesting?",
  bar: ["attention", "batch", "scale"],
  mount,
};

function mount(stage, app) {
  stage.classList.add("heads");
  const controls = app.el("div", { class: "heads-controls" });
  const sheet = app.el("div", { class: "heads-sheet" });
  const said = app.el("p", { class: "note heads-said", "aria-live": "polite" });
  const notes = app.el("p", { class: "note" });
  stage.append(controls, said, sheet, notes);
  const at = { of: "", rows: new Map(), detectors: [], notes: [], thumbs: new Map(), tiles: new Map(), whole: false, laid: "" };
  let control = new AbortController();

  const layers = () => app.attention().layers;
  const all = () => layers().flatMap(({ heads }, layer) => Array.from({ length: heads }, (_, head) => ({ layer, head, name: nameOf(layer, head) })));
  const nameOf = (layer, head) => `${layer}.${numberOf(layers()[layer], head)}`; // as the model counts its heads
  const row = (one) => at.rows.get(one.name);

  // Those that are shown, in their order.
  function chosen(state) {
    const kept = all().filter((one) => !state.only || row(one)?.kind === state.only);
    if (!at.whole || !at.detectors.includes(state.by)) return kept;
    const score = (one) => row(one)?.scores[state.by] ?? -Infinity;
    return kept.sort((a, b) => score(b) - score(a));
  }

  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) thumbs(Number(target.dataset.layer));
  }, { root: stage, rootMargin: "300px" });

  async function thumbs(layer) {
    if (at.thumbs.has(layer)) return;
    at.thumbs.set(layer, null);
    const { kind, part, b } = app.place();
    const { signal } = control;
    try {
      at.thumbs.set(layer, await app.source.thumbs(app.summary().id, { kind, part, b, layer }, signal));
      paint(layer);
      caption(app.state());
    } catch (fault) {
      if (fault.name === "AbortError") return;
      at.thumbs.delete(layer);
      app.fail(fault.message, controls);
    }
  }

  // The small pictures of a layer, in the colours of the present scale.
  function paint(layer) {
    const found = at.thumbs.get(layer);
    if (!found) return;
    const [count, rows, columns] = found.shape;
    for (let head = 0; head < count; head++) {
      const canvas = at.tiles.get(nameOf(layer, head))?.querySelector("canvas");
      if (!canvas) continue;
      Object.assign(canvas, { width: columns, height: rows });
      const image = new ImageData(columns, rows);
      const pixels = new Uint32Array(image.data.buffer);
      const from = head * rows * columns;
      for (let n = 0; n < pixels.length; n++) pixels[n] = at.colours[found.codes[from + n]];
      canvas.getContext("2d").putImageData(image, 0, 0);
    }
  }

  function tile(one) {
    const canvas = app.el("canvas", { "aria-hidden": "true" });
    const label = app.el("span", { class: "head-name numbers" }, one.name);
    const [score, kind] = ["head-score numbers", "head-kind"].map((name) => app.el("span", { class: name }));
    const element = app.el("a", { class: "head", "data-layer": one.layer, "data-head": one.head }, canvas, label, score, kind);
    near.observe(element);
    return element;
  }

  // Names, scores and links of the tiles, which stay where they are.
  function name(state) {
    for (const one of all()) {
      const element = at.tiles.get(one.name);
      const found = row(one);
      const score = found?.scores[state.by];
      element.href = app.link({ view: "map", layer: one.layer, head: one.head, x: null, y: null, zoom: null });
      element.title = found ? `${found.kind}: ${SENTENCES[found.kind] ?? ""}\n${Object.entries(found.scores).map(([key, value]) => `${key} ${three(value)}`).join("\n")}` : "";
      element.querySelector(".head-score").textContent = at.detectors.includes(state.by) ? three(score) : "";
      element.querySelector(".head-kind").textContent = found?.kind ?? "";
      element.setAttribute("aria-label", `Layer ${one.layer}, head ${numberOf(layers()[one.layer], one.head)}${found ? `, ${found.kind}` : ""}: open its map`);
      element.classList.toggle("chosen", one.layer === state.layer && one.head === state.head);
    }
  }

  function lay(state) {
    const shown = chosen(state);
    const grouped = shown.length && !at.detectors.includes(state.by) && !state.only;
    const order = JSON.stringify([grouped, shown.map((one) => one.name)]);
    if (order === at.laid) return;
    at.laid = order;
    const line = (title, heads) => app.el("section", { class: "heads-layer" }, title && app.el("h2", {}, title), app.el("div", { class: "heads-row" }, heads.map((one) => at.tiles.get(one.name))));
    const groups = grouped ? layers().map((_, layer) => line(`layer ${layer}`, shown.filter((one) => one.layer === layer))) : [line(null, shown)];
    sheet.replaceChildren(...groups);
    if (!shown.length) sheet.append(app.el("p", { class: "note" }, "No head here is of this kind on this text."));
  }

  function choices(state) {
    const focused = document.activeElement?.getAttribute("data-control");
    const counts = new Map();
    for (const { kind } of at.rows.values()) if (kind) counts.set(kind, (counts.get(kind) ?? 0) + 1);
    const select = app.el("select", { "data-control": "by", disabled: !at.whole, onchange: () => app.go({ by: select.value || null }) },
      app.el("option", { value: "" }, "layer and head"), at.detectors.map((one) => app.el("option", { value: one, selected: one === state.by }, one)));
    const chip = (kind, text) => app.el("button", { class: "chip", "data-control": `only ${kind}`, title: SENTENCES[kind] ?? "", "aria-pressed": String((state.only ?? "") === kind), onclick: () => app.go({ only: kind || null }) }, text);
    const kinds = [...counts].sort((a, b) => b[1] - a[1]).map(([kind, count]) => chip(kind, `${kind} ${count}`));
    controls.replaceChildren(
      app.el("label", { class: "control" }, app.el("span", { class: "name" }, "in order of"), select),
      app.el("span", { class: "chips", role: "group", "aria-label": "Kinds of head" }, chip("", "all"), kinds),
    );
    if (focused) controls.querySelector(`[data-control="${focused}"]`)?.focus();
  }

  // Asks what kinds they are: a head a line, so that each has its name as soon as it is known.
  async function ask() {
    const { signal } = control;
    const { kind, part } = app.place();
    app.wait("Asking every head what kind it is");
    for await (const line of app.source.heads(app.summary().id, { kind, part }, signal)) {
      if (signal.aborted) return;
      if (line.row) {
        at.rows.set(`${line.row.layer}.${line.row.head}`, line.row);
        app.wait("Asking every head what kind it is", line.done / line.of);
      } else Object.assign(at, { detectors: line.detectors, notes: line.notes, whole: true });
      const state = app.state();
      if (state.view !== "heads") return;
      if (line.row) name(state);
      else show(state);
    }
    app.ready();
  }

  function show(state) {
    choices(state);
    lay(state);
    name(state);
    said.textContent = told(state);
    notes.textContent = at.notes.join(" ");
    caption(state);
  }

  // What the kind that is asked for does, else that of the head that is marked.
  function told({ only, layer, head }) {
    const kind = only ?? at.rows.get(nameOf(layer, head))?.kind;
    if (!kind) return "";
    return only ? `${kind}: ${SENTENCES[kind] ?? ""}` : `Marked is head ${nameOf(layer, head)}, ${kind}: ${SENTENCES[kind] ?? ""}`;
  }

  function caption(state) {
    const { queries, keys } = layers()[state.layer];
    const some = [...at.thumbs.values()].some((one) => one?.sampled) ? "some of its rows" : "many";
    const pooled = Math.max(queries, keys) > 48 ? `; each pixel shows the strongest weight of ${some}` : "";
    app.caption(app.el("b", {}, `${plural(all().length, "head")} in ${plural(layers().length, "layer")}`), ` · in each picture a row is a word that looks (a query), a column one it looks at (a key)${pooled}`);
  }

  function stride(step) {
    const state = app.state();
    const shown = chosen(state);
    const now = shown.findIndex((one) => one.layer === state.layer && one.head === state.head);
    const next = shown[Math.min(Math.max(step(now, shown), 0), shown.length - 1)];
    if (!next) return;
    app.go({ layer: next.layer, head: next.head }, { replace: true });
    at.tiles.get(next.name).focus({ preventScroll: false });
  }

  // How many pictures stand in a line.
  function across() {
    const [first, ...rest] = sheet.querySelectorAll(".head");
    const next = rest.findIndex((one) => one.offsetTop > first.offsetTop);
    return next < 0 ? rest.length + 1 : next + 1;
  }

  return {
    draw(state) {
      const of = JSON.stringify([app.summary().id, state.kind, state.part, state.b]);
      const keys = layers()[state.layer].keys;
      const scale = scaleOf(state, keys);
      at.colours = table(scale);
      app.legend(ofWeights(scale, keys > 48 ? "largest weight" : "weight"));
      if (of !== at.of) begin(of);
      else for (const layer of at.thumbs.keys()) paint(layer);
      show(state);
    },
    leave() {
      control.abort();
      near.disconnect();
    },
    keys: [
      ["ArrowLeft", "the picture before", () => stride((now) => now - 1)],
      ["ArrowRight", "the next picture", () => stride((now) => now + 1)],
      ["ArrowUp", "the picture above", () => stride((now) => now - across())],
      ["ArrowDown", "the picture below", () => stride((now) => now + across())],
      ["Enter", "open its map", () => app.go({ view: "map" })],
    ],
    picture: () => ({ svg: picture(stage) }),
  };

  function begin(of) {
    control.abort();
    control = new AbortController();
    near.disconnect();
    Object.assign(at, { of, rows: new Map(), detectors: [], notes: [], thumbs: new Map(), whole: false, laid: "" });
    at.tiles = new Map(all().map((one) => [one.name, tile(one)]));
    ask().catch((fault) => {
      if (fault.name === "AbortError") return;
      app.ready();
      app.fail(fault.message, controls);
    });
  }
}

// The pictures with their names, as they stand on the page.
function picture(stage) {
  const edge = stage.querySelector(".heads-sheet").getBoundingClientRect();
  const spot = (element) => {
    const { left, top, width, height } = element.getBoundingClientRect();
    return [left - edge.left + EDGE, top - edge.top + EDGE, width, height];
  };
  const wide = Math.max(...[...stage.querySelectorAll(".head")].map((head) => spot(head)[0] + spot(head)[2]), 0); // what is empty beside them is left out
  const pen = svgPen(Math.ceil(wide) + EDGE, Math.ceil(edge.height) + 2 * EDGE, ground("--paper"));
  for (const title of stage.querySelectorAll(".heads-layer h2")) {
    const [x, y, , height] = spot(title);
    pen.text(title.textContent, x, y + height / 2, { size: 13, fill: ground("--faint") });
  }
  for (const head of stage.querySelectorAll(".head")) {
    const canvas = head.querySelector("canvas");
    pen.rect(...spot(canvas), ground("--hidden"));
    if (canvas.width) pen.image(canvas, [0, 0, canvas.width, canvas.height], spot(canvas));
    for (const label of head.querySelectorAll("span")) {
      const [x, y, , height] = spot(label);
      pen.text(label.textContent, x, y + height / 2, { size: 12, fill: ground("--ink") });
    }
  }
  return pen.done();
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
