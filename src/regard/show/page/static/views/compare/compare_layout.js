// The layout of Compare: two pictures and their difference, and the sentences about them.

import { el } from "../../drawing/elements.js";
import { drawLegend } from "../../drawing/legend.js";
import { renderModelChoice } from "../../frame/model_choice.js";
import { snapshotAsSvg } from "../../drawing/svg_snapshot.js";
import { createPane } from "./matrix_pane.js";
import { renderFurthestCells, createReadingLine } from "./cell_text.js";

const NAMES = ["first", "second", "second − first"];
export const DIFFERENCE = 2; // the default pane where only one fits

// Build the layout; user input calls change(side, changes), typed(text, form), pin(q, k) and swap().
export function buildLayout(app, { change, typed, pin, swap }) {
  const panes = NAMES.map((name) => createPane(name));
  const told = el("p", { class: "compare-told", "aria-live": "polite" });
  const note = el("p", { class: "note" });
  const read = createReadingLine();
  const list = el("div", { class: "compare-list" });
  const turner = el("span", { class: "choice compare-turn", role: "group", "aria-label": "Picture shown" });
  const row = el("div", { class: "compare-panes" }, panes.map((one) => one.root));
  const root = el("div", { class: "compare-page" }, told, note, read.element, turner, row, list);
  let now = null; // the pictures drawn, and the pinned cell

  panes[1].picks.after(renderTextForm(app, typed));
  panes[2].shelf.append(el("button", { class: "compare-swap", title: "Swap the sides (x)", "aria-label": "Swap the sides", onclick: swap }, "⇄"));
  for (const { frame } of panes) listenToPointer(frame, {
    point: (place) => now && point(...(place ?? now.pinned ?? [null])),
    pick: (place) => now && pin(...place.map((one) => one * 2 ** now.level)),
  });

  // Mark a cell in all three pictures, and show its weights.
  function point(i, j) {
    const sizes = [...now.parts, now.apart];
    panes.forEach((one, n) => one.point(sizes[n], i, j));
    read.show(now, i, j);
  }

  function renderList() {
    const { found, parts } = now.listed;
    list.hidden = !found.length;
    list.replaceChildren(...renderFurthestCells(found, parts, now.quantity, pin));
  }

  // Select the pane that is shown where only one fits.
  function turn(shown) {
    const button = (name, n) => el("button", { "data-control": `pane ${n}`, "aria-pressed": String(n === shown), onclick: () => app.go({ pane: n === DIFFERENCE ? null : n }, { replace: true }) }, name);
    turner.replaceChildren(...NAMES.map(button));
    panes.forEach((one, n) => one.root.classList.toggle("compare-turned", n === shown));
  }

  return {
    root,
    turn,
    controls: (both) => both.forEach((side, n) => panes[n].set(app, side, (changes) => change(n, changes))),
    pictures(drawn, shade, differ, legends, marks) {
      now = { ...drawn, pinned: null };
      drawn.parts.forEach((one, n) => panes[n].draw(one, shade, one.words, drawn.level, drawLegend(legends[n])));
      panes[2].root.hidden = !drawn.apart.rows;
      if (drawn.apart.rows) panes[2].draw(drawn.apart, differ, drawn.parts[0].words, drawn.level, drawLegend(marks));
    },
    mark(drawn, q, k) {
      if (q !== undefined && k !== undefined) now.pinned = [q, k].map((one) => Math.floor(one / 2 ** drawn.level));
      point(...(now.pinned ?? [null]));
    },
    async exact(cells) {
      const mine = now;
      const found = await cells;
      if (now !== mine || now.level) return;
      const isWeight = now.quantity.name === "weight";
      if (isWeight) writeExactWeights(now, found);
      point(...now.pinned);
      renderList();
      read.exact(found, isWeight);
    },
    told(sentence, said) {
      told.textContent = sentence;
      note.textContent = said;
    },
    list(found, parts) {
      now.listed = { found, parts };
      renderList();
    },
    sheet: () => snapshotAsSvg(row, "form, .compare-swap"),
  };
}

// Write the weights of the pinned cell in place of those of the pictures, which are rounded.
function writeExactWeights({ parts, pinned: [q, k] }, cells) {
  cells.forEach((cell, n) => cell?.visible && (parts[n].weights[q * parts[n].columns + k] = cell.weight));
}

// Render the box for a text that the second side shows.
function renderTextForm(app, typed) {
  const box = el("input", { type: "text", "aria-label": "Another text for the second side", placeholder: "or another text" });
  const form = el("form", { class: "compare-typed", hidden: !app.start.model, onsubmit: (event) => {
    event.preventDefault();
    typed(box.value, form);
  } }, box, renderModelChoice(app.start.models, () => form.requestSubmit()));
  return form;
}

// Call point([row, column] or null) and pick([row, column]) for the cell under the pointer.
function listenToPointer(frame, { point, pick }) {
  const findPlace = (event) => {
    const [rows, columns] = [Number(frame.dataset.rows), Number(frame.dataset.columns)];
    const box = frame.getBoundingClientRect();
    const [i, j] = [Math.floor(((event.clientY - box.top) / box.height) * rows), Math.floor(((event.clientX - box.left) / box.width) * columns)];
    return i >= 0 && j >= 0 && i < rows && j < columns ? [i, j] : null;
  };
  frame.addEventListener("pointermove", (event) => findPlace(event) && point(findPlace(event)));
  frame.addEventListener("pointerleave", () => point(null));
  frame.addEventListener("click", (event) => findPlace(event) && pick(findPlace(event)));
}
