// The numbers of a query that the Image view shows: weights, rollout, or the pull on a number.

import { roundCode } from "../../data/weight_codes.js";
import { createQuantity } from "../../drawing/quantity.js";
import { findLargest } from "../../drawing/strongest_links.js";
import { getSelectedHeads, nameSelectedHeads } from "../../frame/selected_word.js";

const LINKS = 6; // strongest links listed
const NO_PULL = "To see the pull on a number, such as a logit, pass attribution= to regard.page or regard.serve, which needs the model.";

const getLayer = (app, state) => app.attention().layers[state.layer];

function canRollOut(app, state) {
  const place = { ...app.place(), b: state.b ?? 0 };
  return Boolean(app.source.hasRollout ? app.source.hasRollout(app.summary().id, place) : app.attention().rollout);
}

// List the kinds of numbers that a layer has.
export function listKinds(app, state) {
  return ["weights", ...(canRollOut(app, state) ? ["rollout"] : []), ...(getLayer(app, state).pull ? ["pull"] : [])];
}

// Return the kind that is shown: that of the link, where the layer has it.
export const getKind = (app, state) => (listKinds(app, state).includes(state.of) ? state.of : "weights");

// Return why there is no pull, null where there is.
export function explainNoPull(app, state) {
  if (getLayer(app, state).pull) return null;
  return app.summary().number === undefined ? NO_PULL : app.attention().layers.some(({ pull }) => pull) ? `${app.summary().number} has no pull in this layer.` : null;
}

// Return whether single heads can be chosen.
export function hasHeads(app, state) {
  const kind = getKind(app, state);
  return kind === "weights" || (kind === "pull" && getLayer(app, state).pull === getLayer(app, state).heads);
}

// Name the layer and the heads that a kind shows.
export function nameLayer(app, state) {
  if (getKind(app, state) === "rollout") return `Rollout up to layer ${state.layer}`;
  const { heads } = getLayer(app, state);
  return `Layer ${state.layer}, ${hasHeads(app, state) ? nameSelectedHeads(app, state) : heads === 1 ? "its one head" : `mean of its ${heads} heads`}`;
}

export function getQuantity(app, state) {
  if (getKind(app, state) === "pull") return createQuantity("pull", { number: app.summary().number });
  return createQuantity("weight");
}

// Return the query string of a row.
export function makeQuery(app, state, b, q) {
  const heads = getSelectedHeads(app, state);
  return { ...app.place(), b, q, heads: heads.length > 1 || heads[0] !== state.head ? heads.join(",") : null };
}

// Fetch the codes or numbers of a row, and its largest: exact weights, or those of a rollout with the digits of their codes.
export async function fetchNumbers({ source, summary }, kind, query, signal) {
  const { id } = summary();
  const list = (numbers) => findLargest(Array.from(numbers, (one) => (Number.isNaN(one) ? 0 : one)), LINKS, () => "");
  if (kind === "weights") {
    const [codes, top] = await Promise.all([source.row(id, query, signal), source.top(id, { ...query, n: LINKS }, signal)]);
    return { codes, largest: top.found };
  }
  const codes = await source[kind](id, query, signal);
  return { codes, largest: await list(kind === "rollout" ? Array.from(codes, roundCode) : codes) };
}

// Return the exact numbers of a row, NaN where a key is hidden.
export async function readExactNumbers({ source, summary }, { kind, codes, query }) {
  if (kind === "weights") return source.exact(summary().id, "row", query);
  return Array.from(codes, kind === "rollout" ? roundCode : (one) => one);
}
