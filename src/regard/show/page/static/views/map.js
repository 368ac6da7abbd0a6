// The Map view: the whole of one head, from above down to a single weight.

import { headOf } from "../bar.js";
import { camera } from "../camera.js";
import { ground, scaleName, scaleOf, table } from "../colour.js";
import { weight } from "../codes.js";
import { ofWeights } from "../legend.js";
import { canvasPen, svgPen } from "../pen.js";
import { TILE, levels, shelf } from "../tiles.js";
import { hands } from "./hands.js";
import { draw, inSight, level, room, seen } from "./plan.js";
import { readout } from "./readout.js";

const SETTLED = 250; // milliseconds of rest before the link says where one stands

export const view = {
  name: "map",
  title: "Map",
  question: "What does one head look at, everywhere?",
  bar: ["attention", "batch", "layer", "head", "how", "scale"],
  mount,
};

function mount(stage, app) {
  const canvas = app.el("canvas", { tabindex: 0, role: "application", "aria-label": "Map of one head: rows are queries, columns are keys. Arrows step a token." });
  const told = readout(app);
  stage.classList.add("map");
  stage.append(app.el("div", { class: "map-sheet" }, canvas), told.element);
  const context = canvas.getContext("2d");
  const pen = canvasPen(context);
  const at = { size: { width: 0, height: 0 }, pinned: {}, pointed: null, word: app.word };
  let [planned, subject, written, timer, colours, opening] = [false, null, null, null, "", null];

  function frame() {
    planned = false;
    if (!at.camera) return;
    choose();
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, at.size.width, at.size.height);
    draw(pen, at);
  }

  function plan() {
    if (!planned) requestAnimationFrame(frame);
    planned = true;
  }

  // Which tiles and words are needed here, and the colours for them.
  function choose() {
    const z = level(at);
    const sight = inSight(at, z);
    at.tiles.want([[at.levels - 1, 0, 0], ...sight]);
    const state = app.state();
    const tops = sight.map((place) => at.tiles.at(...place)?.top ?? 0);
    const top = weight(Math.max(...tops, 2)) ?? 1;
    if (!at.scale || scaleName(state, at.keys) === "linear" || !at.tiles.waiting()) at.scale = scaleOf(state, at.keys, top);
    const name = `${at.scale.name} ${at.scale.low} ${at.scale.high} ${app.colour.dark()} ${z}`;
    if (name !== colours) {
      colours = name;
      at.table = table(at.scale);
      app.legend(ofWeights(at.scale, z > 0 ? `weight, ${at.how} of ${2 ** z} × ${2 ** z}` : "weight"));
    }
    words();
  }

  function words() {
    for (const { q, k } of [at.pinned, at.pointed ?? {}]) {
      if (q !== undefined && app.word(at.lists.rows, q) === undefined) app.words(at.lists.rows, q, q + 1).then(plan, () => {});
      if (k !== undefined && app.word(at.lists.columns, k) === undefined) app.words(at.lists.columns, k, k + 1).then(plan, () => {});
    }
    if (at.camera.pixels() < 13) return;
    const box = seen(at);
    const needed = [
      [at.lists.rows, at.camera.query(box.y), at.camera.query(box.y + box.height), at.queries],
      [at.lists.columns, at.camera.key(box.x), at.camera.key(box.x + box.width), at.keys],
    ];
    for (const [list, from, to, most] of needed) {
      const [first, last] = [Math.max(0, Math.floor(from)), Math.min(most, Math.ceil(to))];
      if (app.word(list, first) === undefined || app.word(list, last - 1) === undefined) app.words(list, first, last).then(plan, () => {});
    }
  }

  // Another head, or another way of pooling: other tiles, the same place to stand.
  function change(state) {
    const { queries, keys } = app.attention().layers[state.layer];
    const { rows, columns } = app.attention();
    at.tiles?.leave();
    const place = app.place();
    const summary = app.summary().id;
    if (at.queries !== queries || at.keys !== keys || at.of !== summary) {
      Object.assign(at, { queries, keys, of: summary, levels: levels(queries, keys), camera: camera(keys, queries, () => room(at.size)) });
      written = null;
    }
    at.how = state.how ?? "mean";
    at.lists = { rows, columns };
    at.scale = null;
    colours = "";
    const fetch = (query, signal) => app.source.tile(summary, { ...place, ...query, how: at.how }, signal);
    at.tiles = shelf(fetch, plan, (fault) => app.fail(fault.message));
    at.profiles = null;
    at.kind = null;
    return open(summary, place, state);
  }

  // The profiles of the head and its kind; on a long text that takes a moment, which is spoken of.
  async function open(summary, place, state) {
    opening?.abort();
    const control = (opening = new AbortController());
    caption(state);
    app.wait(`Adding up all weights of layer ${state.layer}, head ${headOf(app, state)}`);
    for await (const line of app.source.open(summary, place, control.signal)) {
      if (control !== opening) return;
      if (line.levels === undefined) app.wait(`Adding up all weights of layer ${state.layer}, head ${headOf(app, state)}`, line.done);
      else Object.assign(at, { profiles: line, kind: line.kind });
    }
    app.ready();
    caption(state);
    plan();
  }

  function caption(state) {
    const kind = at.kind ? ` · ${at.kind}` : "";
    app.caption(app.el("b", {}, `Layer ${state.layer}, head ${headOf(app, state)}${kind}`), " · a row is a word that looks (a query), a column one it looks at (a key)");
  }

  // The link follows the camera once it rests.
  function moved() {
    plan();
    clearTimeout(timer);
    timer = setTimeout(() => {
      const { x, y, zoom } = at.camera.here;
      const where = zoom > 1.001 ? { x: tidy(x), y: tidy(y), zoom: tidy(zoom) } : { x: null, y: null, zoom: null };
      written = JSON.stringify([where.x, where.y, where.zoom]);
      app.go(where, { replace: true });
    }, SETTLED);
  }

  function point(cell) {
    if (cell?.q === at.pointed?.q && cell?.k === at.pointed?.k) return;
    at.pointed = cell;
    tell();
    plan();
  }

  function tell() {
    const cell = at.pointed ?? (at.pinned.k === undefined ? null : at.pinned);
    told.show(cell?.q === undefined ? null : cell, at.pinned, pixel(cell));
  }

  // What the pixel over a cell shows, where it holds more than one weight.
  function pixel(cell) {
    const z = at.camera ? level(at) : 0;
    if (!cell || cell.q === undefined || z === 0) return null;
    const [r, c] = [cell.q >> z, cell.k >> z];
    const tile = at.tiles.at(z, Math.floor(r / TILE), Math.floor(c / TILE));
    const found = tile && tile.codes[(r % TILE) * tile.shape[1] + (c % TILE)];
    return found ? { side: 2 ** z, how: at.how, weight: weight(found) } : null;
  }

  function pin(cell, show = false) {
    if (show) at.camera.show(cell.k, cell.q);
    app.go({ q: cell.q ?? null, k: cell.k ?? null }, { replace: show });
  }

  function stride(dq, dk) {
    const box = seen(at);
    const { q, k } = at.pinned;
    const middle = { q: Math.floor(at.camera.query(box.y + box.height / 2)), k: Math.floor(at.camera.key(box.x + box.width / 2)) };
    const from = { q: q ?? middle.q, k: k ?? Math.min(q ?? middle.k, at.keys - 1) };
    const still = q === undefined && k === undefined;
    const step = (value, by, most) => Math.min(Math.max(value + (still ? 0 : by), 0), most - 1);
    pin({ q: step(from.q, dq, at.queries), k: step(from.k, dk, at.keys) }, true);
    if (at.camera.here.zoom > 1) moved();
  }

  function zoom(factor) {
    const box = seen(at);
    const { q, k } = at.pinned;
    const [x, y] = [k === undefined ? box.x + box.width / 2 : at.camera.across(k + 0.5), q === undefined ? box.y + box.height / 2 : at.camera.down(q + 0.5)];
    at.camera.zoom(factor, x, y);
    moved();
  }

  function resize() {
    const { clientWidth: width, clientHeight: height } = canvas.parentElement;
    at.size = { width, height };
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    at.camera?.settle();
    frame();
  }

  const watch = new ResizeObserver(resize);
  watch.observe(canvas.parentElement);
  hands(canvas, at, { moved, point, pin });

  return {
    draw(state) {
      const name = JSON.stringify([app.summary().id, app.place(), state.how]);
      const opened = name === subject ? undefined : change(state);
      subject = name;
      at.pinned = { q: state.q, k: state.k };
      const where = JSON.stringify([state.x ?? null, state.y ?? null, state.zoom ?? null]);
      if (where !== written) stand(state);
      written = where;
      tell();
      colours = "";
      plan();
      return opened; // its error, if it comes to that, is told by the page
    },
    leave() {
      watch.disconnect();
      clearTimeout(timer);
      opening?.abort();
      at.tiles?.leave();
      told.leave();
    },
    keys: [
      ["ArrowUp", "the query before", () => stride(-1, 0)],
      ["ArrowDown", "the next query", () => stride(1, 0)],
      ["ArrowLeft", "the key before", () => stride(0, -1)],
      ["ArrowRight", "the next key", () => stride(0, 1)],
      ["+", "closer", () => zoom(2)],
      ["=", "closer", () => zoom(2)],
      ["-", "farther", () => zoom(0.5)],
      ["0", "the whole map", () => (at.camera.all(), moved())],
    ],
    hands: [
      ["wheel, pinch", "closer or farther, where the pointer is"],
      ["double click", "closer; with Shift farther"],
      ["drag", "moves the map"],
      ["click, tap", "keeps a weight, or the row or column of a word at the side"],
    ],
    picture() {
      const sheet = svgPen(at.size.width, at.size.height, ground("--paper"));
      draw(sheet, { ...at, pointed: null });
      return { svg: sheet.done() };
    },
  };

  function stand(state) {
    if (state.zoom === undefined) at.camera.all();
    else Object.assign(at.camera.here, { x: state.x ?? at.keys / 2, y: state.y ?? at.queries / 2, zoom: state.zoom });
    if (at.size.width) at.camera.settle();
    if (state.zoom !== undefined && at.size.width) at.camera.settle();
  }
}

const tidy = (value) => Number(value.toPrecision(7));
