// Where the page's numbers come from: the server beside it, or the data inside the one file.

import { codes } from "./codes.js";
import { Fault } from "./fault.js";
import { fileSource } from "./file.js";

// The source of this page.
export function connect() {
  return document.getElementById("regard-start") ? fileSource() : serverSource();
}

function serverSource() {
  const at = (r, what, query) => `api/r/${encodeURIComponent(r)}/${what}?${asked(query)}`;
  return {
    file: false,
    start: (signal) => json("api/start", { signal }),
    words: (r, query, signal) => json(at(r, "words", query), { signal }),
    heads: (r, query, signal) => lines(at(r, "heads", query), { signal }),
    thumbs: (r, query, signal) => binary(at(r, "thumbs", query), signal),
    open: (r, query, signal) => lines(at(r, "open", query), { signal }),
    tile: (r, query, signal) => binary(at(r, "tile", query), signal),
    cell: (r, query, signal) => json(at(r, "cell", query), { signal }),
    row: async (r, query, signal) => (await binary(at(r, "row", query), signal)).codes,
    column: async (r, query, signal) => (await binary(at(r, "column", query), signal)).codes,
    top: (r, query, signal) => json(at(r, "top", query), { signal }),
    steps: (r, query, signal) => json(at(r, "steps", query), { signal }),
    example: (query, signal) => json(`api/example?${asked(query)}`, { signal }),
    type: (body, signal) => json("api/type", posted(body, signal)),
    translation: (signal) => json("api/translation", posted({}, signal)),
    examination: (r, body, signal) => json(`api/r/${encodeURIComponent(r)}/examination`, posted(body, signal)),
    generate: (body, signal) => lines("api/generate", posted(body, signal)),
  };
}

const posted = (body, signal) => ({
  method: "POST",
  body: JSON.stringify(body),
  headers: { "Content-Type": "application/json" },
  signal,
});

// The pairs of a query; what is null or undefined is left out.
export function asked(query) {
  const pairs = Object.entries(query ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return new URLSearchParams(pairs).toString().replaceAll("%2C", ",");
}

// An answer that is good; the token of the page's own link goes along.
async function answer(address, options) {
  const token = new URLSearchParams(location.search).get("token");
  const headers = token ? { ...options.headers, "X-Regard-Token": token } : options.headers;
  let response;
  try {
    response = await fetch(address, { ...options, headers });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new Fault("The server does not answer. Is `regard serve` still running? Start it again and reload this page.");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new Fault(told.error ?? `The server answered with an error, ${response.status}, and no sentence about it.`);
}

async function json(address, options) {
  return (await answer(address, options)).json();
}

// Codes and their shape.
async function binary(address, signal) {
  const response = await answer(address, { signal });
  const shape = (response.headers.get("X-Shape") ?? "").split(",").map(Number);
  return { codes: codes(await response.arrayBuffer()), shape, sampled: response.headers.get("X-Sampled") === "1" };
}

// The objects of an answer that streams one a line.
async function* lines(address, options) {
  const reader = (await answer(address, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      kept += value ?? "";
      const whole = kept.split("\n");
      kept = done ? "" : whole.pop();
      for (const line of whole) if (line.trim()) yield said(JSON.parse(line));
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // a reader that stops early stops the computation
  }
}

function said(line) {
  if (line.error) throw new Fault(line.error);
  return line;
}
