// The source of the page's data: the server, or the data in a single file.

import { readCodes, readNumbers } from "./weight_codes.js";
import { Fault } from "./page_error.js";
import { createFileSource } from "./file_source.js";

// Return the source of this page.
export function connectSource() {
  return document.getElementById("regard-start") ? createFileSource() : createServerSource();
}

function createServerSource() {
  const makeAddress = (r, what, query) => `api/r/${encodeURIComponent(r)}/${what}?${formatQuery(query)}`;
  return {
    file: false,
    start: (signal) => fetchJson("api/start", { signal }),
    recordings: async (ids, signal) => (await fetchJson(`api/recordings?${formatQuery({ ids: ids.join() })}`, { signal })).recordings,
    story: (r, signal) => fetchJson(makeAddress(r, "story", {}), { signal }),
    words: (r, query, signal) => fetchJson(makeAddress(r, "words", query), { signal }),
    heads: (r, query, signal) => fetchLines(makeAddress(r, "heads", query), { signal }),
    probe: (r, signal) => fetchLines(makeAddress(r, "probe", {}), { signal }),
    thumbs: (r, query, signal) => fetchBinary(makeAddress(r, "thumbs", query), signal),
    open: (r, query, signal) => fetchLines(makeAddress(r, "open", query), { signal }),
    tile: (r, query, signal) => fetchBinary(makeAddress(r, "tile", query), signal),
    cell: (r, query, signal) => fetchJson(makeAddress(r, "cell", query), { signal }),
    row: async (r, query, signal) => (await fetchBinary(makeAddress(r, "row", query), signal)).codes,
    column: async (r, query, signal) => (await fetchBinary(makeAddress(r, "column", query), signal)).codes,
    // Return the weights of a "row", a "column" or a "tile" with the digits of a float32, NaN where one is hidden.
    exact: async (r, what, query) => (await fetchBinary(makeAddress(r, what, { ...query, exact: 1 }), undefined, readNumbers)).codes,
    top: (r, query, signal) => fetchJson(makeAddress(r, "top", query), { signal }),
    implicit: async (r, query, signal) => (await fetchBinary(makeAddress(r, "implicit", query), signal, readNumbers)).codes,
    implicitCell: (r, query, signal) => fetchJson(makeAddress(r, "implicit_cell", query), { signal }),
    rollout: async (r, query, signal) => (await fetchBinary(makeAddress(r, "rollout", query), signal)).codes,
    pull: async (r, query, signal) => (await fetchBinary(makeAddress(r, "attribution", { ...query, show: "pull" }), signal, readNumbers)).codes,
    settings: (r, signal) => fetchJson(makeAddress(r, "settings", {}), { signal }),
    target: (r, query, signal) => fetchJson(makeAddress(r, "target", query), { signal }),
    attribution: (r, query, signal) => fetchBinary(makeAddress(r, "attribution", query), signal, readNumbers),
    attributionThumbs: (r, query, signal) => fetchBinary(makeAddress(r, "attribution_thumbs", query), signal, readNumbers),
    influence: (r, query, signal) => fetchJson(makeAddress(r, "influence", query), { signal }),
    ablation: (r, query, signal) => fetchJson(makeAddress(r, "ablation", query), { signal }),
    steps: (r, query, signal) => fetchJson(makeAddress(r, "steps", query), { signal }),
    example: (query, signal) => fetchJson(`api/example?${formatQuery(query)}`, { signal }),
    type: (body, signal) => fetchJson("api/type", makePostRequest(body, signal)),
    finding: (r, signal) => fetchJson(makeAddress(r, "finding", {}), { signal }),
    gallery: (body, signal) => fetchJson("api/gallery", makePostRequest(body, signal)),
    translation: (signal) => fetchJson("api/translation", makePostRequest({}, signal)),
    examination: (r, body, signal) => fetchJson(`api/r/${encodeURIComponent(r)}/examination`, makePostRequest(body, signal)),
    stop: (body, signal) => fetchJson("api/stop", makePostRequest(body, signal)),
    generate: (body, signal) => fetchLines("api/generate", makePostRequest(body, signal)),
  };
}

const makePostRequest = (body, signal) => ({
  method: "POST",
  body: JSON.stringify(body),
  headers: { "Content-Type": "application/json" },
  signal,
});

// Format a query string, without empty values.
export function formatQuery(query) {
  const pairs = Object.entries(query ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return new URLSearchParams(pairs).toString().replaceAll("%2C", ",");
}

// Return a successful response, or throw its error as a Fault; the request includes the token of the page's address.
async function fetchResponse(address, options) {
  const token = new URLSearchParams(location.search).get("token");
  const headers = token ? { ...options.headers, "X-Regard-Token": token } : options.headers;
  let response;
  try {
    response = await fetch(address, { ...options, headers });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new Fault("The server does not answer. Check whether `regard serve` is still running; restart it and reload this page.");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new Fault(told.error ?? `The server answered with status ${response.status} and no error message.`);
}

async function fetchJson(address, options) {
  return (await fetchResponse(address, options)).json();
}

// Return codes, or what else `read` makes of the bytes, and their shape.
async function fetchBinary(address, signal, read = readCodes) {
  const response = await fetchResponse(address, { signal });
  const shape = (response.headers.get("X-Shape") ?? "").split(",").map(Number);
  const totals = response.headers.get("X-Totals")?.split(",").map(Number); // of each head, where they are asked for
  return { codes: read(await response.arrayBuffer()), shape, sampled: response.headers.get("X-Sampled") === "1", totals };
}

// Yield the objects of a response that streams one per line.
async function* fetchLines(address, options) {
  const reader = (await fetchResponse(address, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      kept += value ?? "";
      const whole = kept.split("\n");
      kept = done ? "" : whole.pop();
      for (const line of whole) if (line.trim()) yield parseLine(JSON.parse(line));
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // canceling the response stops the computation
  }
}

function parseLine(line) {
  if (line.error) throw new Fault(line.error);
  return line;
}
