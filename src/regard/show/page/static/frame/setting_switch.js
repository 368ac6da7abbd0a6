// The switch beside the pictures: the weight, how much is carried, the pull on the next word, or the change by a cut.

import { createQuantity } from "../drawing/quantity.js";
import { el } from "../drawing/elements.js";
import { formatCount } from "../drawing/number_format.js";
import { quoteWord } from "../drawing/words.js";
import { TERMS } from "./glossary.js";

const NAMES = ["weight", "carried", "pull", "cut"];
const QUESTIONS = { carried: "How much does each token pass on?", pull: "Which token comes next, and why?", cut: "Which token comes next, and why?" };
const NO_MODEL = "A file cannot run a model, which this needs. Run `regard serve --model NAME` and type the text.";
const SECOND = "The second side shows weights alone. ";
const NOT_TYPED = "This is for a text that a language model read on this page: run `regard serve --model NAME` and type the text.";
const NOT_RUN = "This is for a text that the model of this page read: press Run in Type.";

const LABEL = "What is shown of the attention";
const RETRY = 5000; // milliseconds

export const isAboutTarget = (name) => name === "pull" || name === "cut";

// Create the settings of a page: which can be shown and why not, what is shown now, and the logit that it is about.
export function createSettings(app) {
  const reasons = new Map(); // recording -> {setting: reason or null}
  const targets = new Map(); // recording, position and token -> target, or null while it is computed
  const nameTarget = (r, { at, token }) => JSON.stringify([r, at ?? null, token ?? null]);

  async function load(known, key, fetch) {
    if (known.has(key)) return;
    known.set(key, null);
    try {
      known.set(key, await fetch());
      app.redraw();
    } catch (fault) {
      setTimeout(() => known.delete(key), RETRY); // a change of the state after that asks again
      app.ready();
      app.fail(fault.message);
    }
  }

  function explainOf(summary, kind, name) {
    const reason = explainText(app, summary, kind);
    if (reason) return reason;
    load(reasons, summary.id, () => app.source.settings(summary.id));
    return reasons.get(summary.id)?.[name] ?? null;
  }

  return {
    // Return why the model cannot be run on the text of a state, or null.
    explainModel: (state) => explainText(app, app.summary(), state.kind),
    // Return why a setting cannot be shown in a state, or null; Compare shows it of two recordings.
    explain(state, name) {
      const summary = app.summary();
      if (name === "weight" || !summary) return null;
      const other = state.view === "compare" ? app.shelf().find((one) => one.id === state.r2) : undefined;
      const first = explainOf(summary, state.kind, name);
      const second = !first && (other || state.kind2) ? explainOf(other ?? summary, state.kind2 ?? state.kind, name) : null;
      return second ? SECOND + second : first;
    },
    get: (state) => (NAMES.includes(state.show) && !reasonOf(app, state) ? state.show : "weight"),
    // Return the parameters of a request for what a state shows.
    query: (state) => ({ show: state.show, ...(isAboutTarget(state.show) ? { at: state.at, token: state.token } : {}) }),
    // Return the logit that pull and cut are about, or undefined until it is known.
    target(state) {
      const { id } = app.summary();
      const key = nameTarget(id, state);
      load(targets, key, () => app.source.target(id, { at: state.at, token: state.token }));
      return targets.get(key) ?? undefined;
    },
    quantity(state) {
      const name = this.get(state);
      return createQuantity(name, isAboutTarget(name) ? this.target(state) : undefined);
    },
  };
}

function explainText(app, summary, kind) {
  if (app.source.file) return NO_MODEL;
  return summary?.attributable && kind === "self" ? null : app.start.model ? NOT_RUN : NOT_TYPED;
}

const reasonOf = (app, state) => app.settings.explain(state, state.show);

// Return the question of a view that shows a setting.
export const askQuestion = (app, state) => QUESTIONS[app.settings.get(state)];

// Render the switch; a setting that cannot be shown says why.
export function renderSettingSwitch(app, state) {
  const now = app.settings.get(state);
  const reasons = new Map(NAMES.map((name) => [name, app.settings.explain(state, name)]));
  const choose = (name) => (reasons.get(name) ? app.fail(reasons.get(name)) : app.go({ show: name, ...(state.view === "steps" && { step: name === "weight" ? "weights" : name }) })); // its own step
  const describe = (name) => ({ title: reasons.get(name) ?? app.inUnits(TERMS[name]), "aria-disabled": reasons.get(name) ? "true" : null });
  const buttons = [...reasons.keys()].map((name) => el("button", { "data-control": `show ${name}`, ...describe(name), "aria-pressed": String(name === now), onclick: () => choose(name) }, name));
  const choice = el("span", { class: "choice at-width", role: "group", "aria-label": LABEL }, buttons);
  const select = el("select", { class: "on-phone", "data-control": "show", "aria-label": LABEL, onchange: () => { // a row of buttons takes a line of a phone
    const name = select.value;
    select.value = now;
    choose(name);
  } }, [...reasons.keys()].map((name) => el("option", { value: name, ...describe(name), selected: name === now }, name)));
  const name = el("span", { class: "name at-width" }, "show"); // on a phone "weight" alone, or "pull of ‘They’ after ‘.’"
  return el("span", { class: "control" }, name, choice, select);
}

// Render the choice of the logit that pull and cut are about: a likely word, after the last word or after the selected one.
export function renderTargetChoice(app, state) {
  if (!isAboutTarget(app.settings.get(state))) return null;
  const target = app.settings.target(state);
  return el("span", { class: "control target", title: `${TERMS.logit} This is the token whose score is explained.` },
    el("span", { class: "name" }, el("span", { class: "at-width" }, "logit "), "of"), renderTokens(app, state, target), el("span", { class: "name" }, "after"), renderPlaces(app, state));
}

function renderTokens(app, state, target) {
  const likeliest = target?.likeliest ?? [];
  const all = target && !likeliest.some((one) => one.token === target.token) ? [...likeliest, target] : likeliest;
  const options = all.map((one) => el("option", { value: one.token, selected: one.token === target.token }, `${quoteWord(one.word)}${one.probability === undefined ? "" : ` ${Math.round(100 * one.probability)} %`}`));
  const choose = () => app.go({ token: Number(select.value) === likeliest[0].token ? null : Number(select.value) });
  const select = el("select", { "data-control": "token", "aria-label": "Next token", "aria-busy": String(!target), onchange: choose }, options.length ? options : el("option", {}, "…"));
  return select;
}

function renderPlaces(app, state) {
  const last = app.attention().layers[state.layer].queries - 1;
  const at = state.at ?? last;
  const places = [...new Set([last, state.q ?? last, at])];
  const name = (place) => `${quoteWord(app.word(app.attention().rows, place) ?? "…")} ${place === last ? "(last)" : `(${formatCount(place)})`}`;
  const options = places.map((place) => el("option", { value: place, selected: place === at }, name(place)));
  const select = el("select", { "data-control": "at", "aria-label": "Token before it", onchange: () => app.go({ at: Number(select.value) === last ? null : Number(select.value), token: null }) }, options);
  return select;
}
