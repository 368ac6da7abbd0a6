// The readout next to a map: the exact weight, score and rank of a cell, and the strongest links of a pinned row or column.

import { el, isTouch } from "../../drawing/elements.js";
import { formatCount, formatThreeDigits } from "../../drawing/number_format.js";
import { findLargest, listStrongestLinks } from "../../drawing/strongest_links.js";
import { renderWord } from "../../drawing/words.js";

const MEANT = {
  weight: "The share of the query’s attention on this key; the weights of a row add up to 1",
  score: "The match of query and key before the softmax, which converts a row of scores to weights",
  rank: "1 is the key with the largest weight in the row",
  effect: "What the switch above selects",
  pixel: "The value of this pixel of the map, which covers many weights",
};

export function createReadout(app) {
  const pair = el("p", { class: "readout-pair" });
  const fields = Object.fromEntries(["weight", "score", "rank", "effect", "pixel"].map((name) => [name, el("dd", { class: "numbers" })]));
  const cell = el("div", { class: "readout-cell", role: "status" }, pair,
    el("dl", {}, Object.entries(fields).map(([name, field]) => [el("dt", { title: MEANT[name] }, name), field])));
  const links = el("div", { class: "readout-links" });
  const element = el("aside", { class: "readout", "aria-label": "Selected cell" }, cell, links);
  let [asking, standing, linked] = [null, "", ""];

  // Show a cell {q, k} or null, the links of the pinned row or column, and the value of a pixel that covers many weights.
  function show(at, pinned, pixel) {
    linksOf(pinned);
    const place = app.place();
    const quantity = app.settings.quantity(app.state());
    const shown = quantity.name === "weight" ? null : app.settings.query(app.state());
    showFields(quantity);
    const name = JSON.stringify([app.shownId(), place, at, shown]);
    fields.pixel.textContent = pixel ? `${pixel.how} of ${formatCount(pixel.side)} × ${formatCount(pixel.side)}: ${pixel.text}` : "";
    fields.pixel.previousSibling.hidden = !pixel;
    if (name === standing) return;
    standing = name;
    asking?.abort();
    cell.classList.toggle("idle", !at);
    if (!at) {
      pair.replaceChildren(isTouch() ? "Tap the map to read a weight." : "Point at the map to read a weight; click to keep it.");
      for (const one of ["weight", "score", "rank", "effect"]) fields[one].textContent = "";
      return;
    }
    nameWords(at);
    fields.weight.title = ""; // the text is still that of the previous cell
    fields.effect.textContent = fields.effect.title = "";
    cell.classList.add("asking");
    exact(at, place, shown);
  }

  // Show the field of the setting in place of the score, unless the setting is the weight.
  function showFields({ name }) {
    const others = name !== "weight";
    for (const [field, hidden] of [["score", others], ["effect", !others]]) for (const part of [fields[field], fields[field].previousSibling]) part.hidden = hidden;
    fields.effect.previousSibling.textContent = name;
  }

  function nameWords({ q, k }) {
    const { rows, columns } = app.attention();
    const word = (list, n) => el("span", {}, el("b", {}, renderWord(app.word(list, n) ?? "…", 24)), el("span", { class: "numbers note" }, ` ${formatCount(n)}`));
    pair.replaceChildren(word(rows, q), " attends to ", word(columns, k));
    if (app.word(rows, q) === undefined || app.word(columns, k) === undefined) {
      const name = standing;
      Promise.all([app.words(rows, q, q + 1), app.words(columns, k, k + 1)]).then(() => name === standing && nameWords({ q, k }), () => {});
    }
  }

  async function exact(at, place, shown) {
    const control = (asking = new AbortController());
    try {
      const [found, row] = await Promise.all([
        app.source.cell(app.shownId(), { ...place, ...at }, control.signal),
        shown && app.source.attribution(app.summary().id, { ...place, ...shown, q: at.q }, control.signal),
      ]);
      if (control !== asking) return;
      const { isSigned, write, format } = app.settings.quantity(app.state());
      fields.effect.textContent = row && found.visible ? (isSigned ? format : write)(row.codes[at.k]) : "–";
      fields.effect.title = row && found.visible ? `${row.codes[at.k]} (click to copy)` : "";
      fields.effect.onclick = () => navigator.clipboard?.writeText(String(row?.codes[at.k]));
      cell.classList.remove("asking");
      const hasNumber = found.visible && found.weight !== null;
      fields.weight.textContent = hasNumber ? formatThreeDigits(found.weight) : found.visible ? "not a number (NaN)" : "hidden from this query";
      fields.weight.title = hasNumber ? `${found.weight} (click to copy)` : "";
      fields.weight.onclick = () => navigator.clipboard?.writeText(String(found.weight));
      fields.score.textContent = formatThreeDigits(found.score);
      fields.score.title = found.score === null ? "" : String(found.score);
      fields.rank.textContent = hasNumber ? `${formatCount(found.rank)} of ${formatCount(found.of)}` : "–";
      app.fail("", element);
    } catch (fault) {
      if (fault.name !== "AbortError") app.fail(fault.message, element);
    }
  }

  // Show the strongest links of a pinned row or column.
  async function linksOf({ q, k }) {
    const state = app.state();
    const quantity = app.settings.quantity(state);
    const shown = quantity.name === "weight" ? null : app.settings.query(state);
    const name = JSON.stringify([app.shownId(), app.place(), q, q === undefined ? k : null, shown]);
    if (name === linked) return;
    linked = name;
    if (q === undefined && k === undefined) return links.replaceChildren();
    const asked = q === undefined ? { k } : { q };
    try {
      const { rows, columns } = app.attention();
      const word = async (place) => (await app.words(q === undefined ? rows : columns, place, place + 1))[0];
      const found = shown ? await findLargest((await app.source.attribution(app.summary().id, { ...app.place(), ...shown, ...asked })).codes, 8, word)
        : (await app.source.top(app.shownId(), { ...app.place(), ...asked, n: 8 })).found;
      if (name !== linked) return;
      const go = (one) => app.go(q === undefined ? { q: one.place, k } : { q, k: one.place });
      const title = shown ? `Largest ${quantity.noun} in the ${q === undefined ? "column" : "row"}` : q === undefined ? "Receives most attention from" : "Attends most to";
      links.replaceChildren(el("h2", {}, title), listStrongestLinks(found, go, quantity));
    } catch (fault) {
      if (fault.name !== "AbortError") app.fail(fault.message, links);
    }
  }

  return { element, show, leave: () => asking?.abort() };
}
