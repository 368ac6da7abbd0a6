// The layout of Steps: the examples, the list of steps, the scene and the bars.

import { el } from "../../drawing/elements.js";
import { writeMinusSigns } from "../../drawing/number_format.js";
import { renderBars } from "./query_bars.js";
import { createPanel, isDense } from "./number_table.js";
import { UNTOUCHED } from "./switches.js";

export function buildLayout(app, move, go) {
  const examples = renderExamples(app);
  const title = el("h2");
  const heads = el("span", { class: "choice", role: "group", "aria-label": "Head of the example" });
  const notes = el("div", { class: "note" });
  const line = createStepLine(move, go);
  const stage = createScene();
  const copier = el("button", { class: "chip", title: "Copy the numbers with every digit (c)" }, "copy the numbers");
  const bars = el("div", { class: "steps-bars" });
  const side = el("aside", { class: "steps-side", "aria-label": "Switches and weights" }, bars);
  const main = el("section", { class: "steps-main" }, el("div", { class: "steps-head" }, title, heads), line.element, stage.parts, el("div", { class: "steps-foot" }, copier), notes);
  const body = el("div", { class: "steps-body", hidden: true }, main, side); // until there are numbers
  const root = el("div", { class: "steps-page" }, examples.element, body);

  return {
    root,
    side,
    pick: examples.pick,
    // Put the pictures of a weight at the side, or in one column above the tables.
    placeTrace: (trace, isNarrow) => (isNarrow ? stage.sumLine.after(trace) : side.prepend(trace)),
    head(data, choose) {
      body.hidden = false;
      title.textContent = data.before ? data.title : "";
      notes.replaceChildren(...data.notes.map((note) => el("p", {}, note)));
      heads.hidden = !(data.heads > 1);
      heads.replaceChildren(...Array.from({ length: data.heads ?? 0 }, (_, n) => el("button", { "aria-pressed": String(n === data.head), onclick: () => choose(n) }, `head ${n + 1}`)));
    },
    steps: line.set,
    scene: stage.set,
    sum: stage.sum,
    bars(told, data, at, on) {
      bars.hidden = !told.own;
      if (told.own) bars.replaceChildren(...renderBars(told, data, at, on));
    },
    onCopy: (listener) => copier.addEventListener("click", listener),
    copied: (text = "copied") => {
      copier.textContent = text;
      setTimeout(() => (copier.textContent = "copy the numbers"), 1500);
    },
  };
}

// Render the choice of the recording's words or an example of the lectures.
function renderExamples(app) {
  const start = (changes) => () => app.go({ ...UNTOUCHED, step: null, head: 0, ...changes });
  const own = app.summary() && el("button", { class: "chip", onclick: start({ example: null }) }, "this text");
  const chips = app.start.examples.map(({ name, title, summary }) =>
    el("button", { class: "chip", "data-example": name, title: `${title}. ${summary ?? ""}`, onclick: start({ example: name, row: null, column: null }) }, name));
  const translation = app.start.translation && [el("span", { class: "note" }, "or"), el("button", { class: "chip", "data-translation": "", title: app.start.translation.sentence, onclick: () => app.translation("steps") }, "a translation")];
  const all = [own, el("span", { class: "note", title: "From lecture notes that code attention from scratch; nothing else is needed to follow them" }, "small examples:"), ...chips, translation].flat().filter(Boolean);
  const element = el("nav", { class: "steps-examples", "aria-label": "Examples" }, all);

  function pick(example) {
    own?.setAttribute("aria-pressed", String(!example));
    for (const chip of chips) chip.setAttribute("aria-pressed", String(chip.dataset.example === example));
    element.querySelector("[aria-pressed=true]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  return { element, pick };
}

// Create the list of steps above a slider, with a button on either side.
function createStepLine(move, go) {
  const slider = el("input", { type: "range", min: 0, step: 1, "aria-label": "Step", oninput: () => go(slider.steps[slider.value]) });
  const list = el("div", { class: "steps-names" });
  const back = el("button", { "aria-label": "previous step", onclick: () => move(-1) }, "‹");
  const forth = el("button", { "aria-label": "next step", onclick: () => move(1) }, "›");
  const element = el("div", { class: "steps-walk" }, back, el("div", { class: "steps-line" }, el("div", { class: "steps-inner" }, list, slider)), forth);

  function set(all, now) {
    Object.assign(slider, { steps: all, max: all.length - 1, value: now });
    slider.setAttribute("aria-valuetext", all[now]);
    element.style.setProperty("--steps", all.length);
    const focused = list.contains(document.activeElement);
    list.replaceChildren(...all.map((name, n) => el("button", { class: "quiet", "aria-current": n === now && "step", title: name, onclick: () => go(name) }, name)));
    if (focused) list.children[now].focus();
    list.children[now].scrollIntoView({ block: "nearest", inline: "nearest" });
    [back.disabled, forth.disabled] = [now === 0, now === all.length - 1];
  }

  return { element, set };
}

// Create the scene of a step: its formula, a sentence, the calculation of one number, and its tables.
function createScene() {
  const formula = el("p", { class: "steps-formula" });
  const sentence = el("p", { class: "steps-sentence", "aria-live": "polite" });
  const sum = el("p", { class: "steps-sum numbers" });
  const tables = el("div", { class: "steps-tables" });

  function set(now, at, { pick }) {
    formula.replaceChildren(el("b", {}, now.name), writeMinusSigns(formatHeading(now).slice(now.name.length)));
    sentence.textContent = writeMinusSigns(now.sentence);
    const focused = tables.querySelector(":focus")?.closest("tr")?.rowIndex;
    const panel = (one, n) => createPanel({ ...one, focus: getFocus(now, at, n), pick: pick && ((row, column, hovering) => pick(row, column, hovering, n)) });
    measureTables(tables, now.panels);
    tables.replaceChildren(...now.panels.map(panel), ...renderLines(now));
    if (focused) tables.querySelector("table")?.rows[focused]?.querySelector("button")?.focus();
  }

  return {
    parts: [formula, sentence, sum, tables],
    sumLine: sum,
    set,
    sum: (of, calculation, value) => sum.replaceChildren(...(of ? [el("b", {}, of), el("span", { title: String(value) }, writeMinusSigns(calculation))] : [])),
  };
}

// Tell the style sheet how many cells the tables have, and how wide the words of their rows are.
function measureTables(tables, panels) {
  const longest = Math.max(...panels.flatMap(({ rows }) => rows.map((word) => String(word).length)), 1);
  tables.classList.toggle("steps-dense", panels.some(isDense));
  tables.style.setProperty("--columns", Math.max(...panels.map(({ columns }) => columns.length), 1));
  tables.style.setProperty("--rows", Math.max(...panels.map(({ rows }) => rows.length), 1));
  tables.style.setProperty("--label", `${Math.min(9, 0.5 * longest + 1.5)}rem`);
}

// Return the cell or the row that is marked in a table of a scene: of q, k and v the query's row of q, and the key's of k and v.
function getFocus(now, at, panel) {
  if (now.panels[0]?.upright) return { row: at.column, column: 0 };
  if (now.live) return { row: at.row, column: now.name === "context" ? at.number : at.column };
  return now.name.startsWith("q, k") ? { row: panel === 0 ? at.row : panel < 3 ? at.column : null } : null;
}

function renderLines({ lines }) {
  if (!lines?.length) return [];
  return [el("dl", { class: "steps-lines numbers" }, lines.map((one) => [el("dt", {}, one.label), el("dd", {}, writeMinusSigns(one.calculation))]))];
}

// Format the heading of a scene, its name and formula, as regard walk does.
export function formatHeading({ name, formula, panels }) {
  const equals = panels.length && !name.replaceAll(", ", ",").includes(" ");
  return equals ? `${name} = ${formula}` : `${name}: ${formula}`;
}
