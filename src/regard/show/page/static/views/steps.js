// Steps: the computation of one head as the lectures draw it, a step at a time, with its numbers and switches.

import { written } from "../arithmetic.js";
import { headOf } from "../bar.js";
import { three } from "../codes.js";
import { css, shade } from "../colour.js";
import { el } from "../el.js";
import { names } from "../narration.js";
import { panel, panelsSvg, tabbed } from "../panel.js";
import { naming, story } from "../scenes.js";
import { settings, switches, UNTOUCHED } from "../switches.js";
import { quoted, shown } from "../words.js";

const BARS = 16; // words listed with their weights

export const view = {
  name: "steps",
  title: "Steps",
  question: "How does a number come about?",
  bar: (state) => (state.example ? [] : ["attention", "batch", "layer", "head"]),
  mount,
};

function mount(stage, app) {
  const page = skeleton(app, (by) => move(by), (step) => app.go({ step }, { replace: true }));
  const switched = switches((changes) => app.go(changes, { replace: true }));
  page.side.prepend(switched.element);
  stage.classList.add("steps");
  stage.append(page.root);
  let loaded = { key: null, data: null };
  let told = null; // the story on screen
  let at = { row: 0, column: 0, number: 0 }; // the query, the key, and the number of the context
  let asking = null;

  const chosen = (state) => state.example ?? (app.summary() ? null : "simple");
  const axes = (state) => (chosen(state) ? ["row", "column"] : ["q", "k"]);

  async function draw(state) {
    const example = chosen(state);
    const layer = example ? null : app.attention().layers[state.layer];
    const long = layer && Math.max(layer.queries, layer.keys) > app.start.limits.steps;
    const key = example ? `${example} ${state.head}` : JSON.stringify([state.r, app.place(), long ? (state.q ?? null) : null]);
    page.pick(example);
    if (key !== loaded.key) {
      asking?.abort();
      const { signal } = (asking = new AbortController());
      app.wait("Fetching the steps");
      const asked = example ? app.source.example({ name: example, head: state.head }, signal) : app.source.steps(state.r, { ...app.place(), q: state.q }, signal);
      loaded = { key, data: await asked };
      app.ready();
      state = app.state();
    }
    render(state);
  }

  function render(state) {
    const { data } = loaded;
    const [row, column] = axes(state).map((name) => state[name]);
    at.row = data.partial || row === undefined ? data.focus : clamp(Number(row), data.rows.length);
    told = story(data, settings(state), at.row);
    const weights = told.own?.weights[at.row] ?? [];
    at.column = column === undefined ? weights.indexOf(Math.max(...weights)) : clamp(Number(data.partial ? data.places.indexOf(Number(column)) : column), data.columns.length);
    const names = told.scenes.map((scene) => scene.name);
    const first = data.before ? 0 : Math.max(names.indexOf("scores"), 0);
    at.scene = names.includes(state.step) ? names.indexOf(state.step) : first;
    page.head(data, (head) => app.go({ head }));
    page.steps(names, at.scene);
    switched.draw(data, state);
    page.bars(told, data, at, pickColumn, pickRow);
    scene();
    caption(state);
  }

  function scene() {
    const now = told.scenes[at.scene];
    page.scene(now, at, now.live ? { pick } : {});
    arithmetic(at.row, now.name === "context" ? at.number : at.column);
  }

  // How the number under the pointer, or the one that is picked, comes about.
  function arithmetic(row, column) {
    const now = told.scenes[at.scene];
    const { data } = loaded;
    if (!now.live || column < 0) return page.sum("");
    const asks = names(data.rows, { quoted: !data.before })(row);
    const of = now.name === "context" ? `number ${column + 1} of ${asks}` : `${asks} → ${names(data.columns, naming(data))(column)}`;
    page.sum(of, written(now.name, told.problem, told.steps, row, column), told.steps[now.name][row][column]);
  }

  function pick(first, second, hovering = false) {
    const [row, column] = told.scenes[at.scene].panels[0].upright && first !== null ? [at.row, first] : [first, second];
    if (hovering) return row === null ? arithmetic(at.row, told.scenes[at.scene].name === "context" ? at.number : at.column) : arithmetic(row, column);
    if (told.scenes[at.scene].name === "context" && column !== null) at.number = column;
    else if (column !== null) return select(row, column);
    select(row);
  }

  function select(row, column) {
    const [rows, columns] = axes(app.state());
    const { data } = loaded;
    const places = data.partial ? data.places : null;
    const changes = data.partial ? {} : { [rows]: row };
    if (column !== undefined) changes[columns] = places ? places[column] : column;
    app.go(changes, { replace: true });
  }

  const pickColumn = (column) => select(at.row, column);
  const pickRow = (row) => select(row);

  function move(by) {
    const next = clamp(at.scene + by, told?.scenes.length ?? 1);
    if (told) app.go({ step: told.scenes[next].name }, { replace: true });
  }

  function turn(by, across) {
    if (!told?.own) return;
    if (across) return select(at.row, clamp(at.column + by, loaded.data.columns.length));
    if (!loaded.data.partial) return select(clamp(at.row + by, loaded.data.rows.length));
    const count = app.attention().layers[app.state().layer].queries;
    app.go({ q: clamp((app.state().q ?? count - 1) + by, count) }, { replace: true });
  }

  function caption(state) {
    const { data } = loaded;
    const where = chosen(state) ? [app.el("b", {}, data.title), data.source ? `, ${data.source}` : ""] : [app.el("b", {}, `Layer ${state.layer}, head ${headOf(app, state)}`), ` of ${app.summary().model}`];
    app.caption(...where, data.partial ? ": a row for each key, the column is the query." : data.rows.length ? ": a row is a word that looks (a query), a column one it looks at (a key)." : ".");
  }

  const keys = [
    ["ArrowRight", "the next step; with Shift the next key", (event) => (event.shiftKey ? turn(1, true) : move(1))],
    ["ArrowLeft", "the step before; with Shift the key before", (event) => (event.shiftKey ? turn(-1, true) : move(-1))],
    ["ArrowDown", "the next query", () => turn(1)],
    ["ArrowUp", "the query before", () => turn(-1)],
    ["c", "copy the numbers, every digit", () => copy()],
    ["Escape", "as the head does it, nothing picked", () => app.go({ ...UNTOUCHED, q: null, k: null, row: null, column: null }, { replace: true })],
  ];

  function copy() {
    const now = told?.scenes[at.scene];
    if (now?.panels.length) navigator.clipboard?.writeText(now.panels.map(tabbed).join("\n\n")).then(() => page.copied(), () => page.copied("The browser does not allow it."));
  }
  page.onCopy(copy);

  const picture = () => {
    const now = told?.scenes[at.scene];
    return now && { svg: panelsSvg(`${loaded.data.title}: ${heading(now)}`, now.panels) };
  };
  return { draw, leave: () => asking?.abort(), keys, picture };
}

// What stands on the page from the first, and how its parts are set.
function skeleton(app, move, go) {
  const examples = el("nav", { class: "steps-examples", "aria-label": "Examples" });
  const title = el("h2");
  const notes = el("div", { class: "note" });
  const heads = el("span", { class: "choice", role: "group", "aria-label": "Head of the example" });
  const slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Step", oninput: () => go(slider.steps[slider.value]) });
  const list = el("div", { class: "steps-names" });
  const formula = el("p", { class: "steps-formula" });
  const sentence = el("p", { class: "steps-sentence", "aria-live": "polite" });
  const tables = el("div", { class: "steps-tables" });
  const sum = el("p", { class: "steps-sum numbers" });
  const copier = el("button", { class: "chip", title: "Copy the numbers with every digit (c)" }, "copy the numbers");
  const bars = el("div", { class: "steps-bars" });
  const side = el("aside", { class: "steps-side", "aria-label": "Switches and weights" }, bars);
  const walk = el("div", { class: "steps-walk" }, el("button", { "aria-label": "step before", onclick: () => move(-1) }, "‹"), el("div", { class: "steps-line" }, el("div", { class: "steps-inner" }, list, slider)), el("button", { "aria-label": "next step", onclick: () => move(1) }, "›"));
  const main = el("section", { class: "steps-main" }, el("div", { class: "steps-head" }, title, heads), walk, formula, sentence, sum, tables, el("div", { class: "steps-foot" }, copier), notes);
  const root = el("div", { class: "steps-page" }, examples, el("div", { class: "steps-body" }, main, side));

  const own = app.summary() && el("button", { class: "chip", onclick: () => app.go({ ...UNTOUCHED, example: null, step: null, head: 0 }) }, "these words");
  const chips = app.start.examples.map(({ name, title: said, summary }) =>
    el("button", { class: "chip", "data-example": name, title: `${said}. ${summary ?? ""}`, onclick: () => app.go({ ...UNTOUCHED, example: name, step: null, head: 0, row: null, column: null }) }, name));
  examples.append(...[own, el("span", { class: "note" }, "the lectures’:"), ...chips].filter(Boolean));

  return {
    root,
    side,
    pick(example) {
      own?.setAttribute("aria-pressed", String(!example));
      for (const chip of chips) chip.setAttribute("aria-pressed", String(chip.dataset.example === example));
      examples.querySelector("[aria-pressed=true]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
    },
    head(data, choose) {
      title.textContent = data.before ? data.title : "";
      notes.replaceChildren(...data.notes.map((note) => el("p", {}, note)));
      heads.hidden = !(data.heads > 1);
      heads.replaceChildren(...Array.from({ length: data.heads ?? 0 }, (_, n) => el("button", { "aria-pressed": String(n === data.head), onclick: () => choose(n) }, `head ${n + 1}`)));
    },
    steps(all, now) {
      slider.steps = all;
      slider.max = all.length - 1;
      slider.value = now;
      slider.setAttribute("aria-valuetext", all[now]);
      root.style.setProperty("--steps", all.length);
      const focused = list.contains(document.activeElement);
      list.replaceChildren(...all.map((name, n) => el("button", { class: "quiet", "aria-current": n === now && "step", title: name, onclick: () => go(name) }, name)));
      if (focused) list.children[now].focus();
      list.children[now].scrollIntoView({ block: "nearest", inline: "nearest" });
      [walk.firstChild.disabled, walk.lastChild.disabled] = [now === 0, now === all.length - 1];
    },
    scene(now, at, { pick }) {
      formula.replaceChildren(...marked(now));
      sentence.textContent = now.sentence;
      const focused = tables.querySelector(":focus")?.closest("tr")?.rowIndex;
      const focus = now.panels[0]?.upright ? { row: at.column, column: 0 } : now.live ? { row: at.row, column: now.name === "context" ? at.number : at.column } : now.name.startsWith("q, k") ? { row: at.row } : null;
      const lines = now.lines?.length ? [el("dl", { class: "steps-lines numbers" }, now.lines.map((one) => [el("dt", {}, one.label), el("dd", {}, one.calculation)]))] : [];
      tables.replaceChildren(...now.panels.map((one) => panel({ ...one, focus, pick })), ...lines);
      if (focused) tables.querySelector("table")?.rows[focused]?.querySelector("button")?.focus();
    },
    sum(of, calculation, value) {
      sum.replaceChildren(...(of ? [el("b", {}, of), el("span", { title: String(value) }, calculation)] : []));
    },
    bars(told, data, at, pickColumn, pickRow) {
      bars.hidden = !told.own;
      if (told.own) bars.replaceChildren(...looked(told, data, at, pickColumn, pickRow));
    },
    onCopy: (listener) => copier.addEventListener("click", listener),
    copied: (text = "copied") => {
      copier.textContent = text;
      setTimeout(() => (copier.textContent = "copy the numbers"), 1500);
    },
  };
}

// The name and formula of a scene, as regard walk heads it.
function heading({ name, formula, panels }) {
  const equals = panels.length && !name.replaceAll(", ", ",").includes(" ");
  return equals ? `${name} = ${formula}` : `${name}: ${formula}`;
}

function marked(now) {
  const rest = heading(now).slice(now.name.length);
  return [el("b", {}, now.name), rest];
}

// What the query looks at, as bars; where something is switched, a mark for what the head itself does.
function looked(told, data, at, pickColumn, pickRow) {
  const [now, own] = [told.steps.weights[at.row], told.own.weights[at.row]];
  const all = now.map((_, j) => j);
  const listed = all.length > BARS ? all.sort((a, b) => now[b] - now[a]).slice(0, BARS).sort((a, b) => a - b) : all;
  const top = Math.max(...now, ...own, 1e-9);
  const rows = listed.map((j) =>
    el("button", { class: "steps-bar quiet", "aria-pressed": String(j === at.column), onclick: () => pickColumn(j) },
      el("span", { class: "steps-word" }, shown(data.columns[j])),
      el("span", { class: "steps-track" },
        el("span", { class: "steps-fill", style: { width: `${(100 * now[j]) / top}%`, backgroundColor: css(shade(0.25 + (0.75 * now[j]) / top)) } }),
        told.untouched ? null : el("span", { class: "steps-was", style: { left: `${(100 * own[j]) / top}%` }, title: `itself: ${three(own[j])}` })),
      el("span", { class: "numbers" }, told.steps.masked[at.row][j] === -Infinity ? "–" : three(now[j]))));
  const heading = el("h2", {}, "What ", data.partial ? quoted(data.rows[0]) : asker(data, at, pickRow), " looks at");
  return [heading, ...rows, told.untouched ? null : el("p", { class: "note" }, "The thin marks are what the head does without the switches."), all.length > BARS ? el("p", { class: "note" }, `the ${BARS} largest of ${all.length}`) : null].filter(Boolean);
}

function asker(data, at, pickRow) {
  const select = el("select", { "aria-label": "Query", onchange: () => pickRow(Number(select.value)) }, data.rows.map((_, n) => el("option", { value: n, selected: n === at.row }, names(data.rows)(n))));
  return select;
}

const clamp = (value, count) => Math.min(Math.max(Math.trunc(value) || 0, 0), Math.max(count - 1, 0));
