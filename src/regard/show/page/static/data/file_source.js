// The source of a page in a single file: the answers of the server, computed from the data in the file.

import { decodeWeight, encodeWeight, readCodes, readNumbers, roundCode } from "./weight_codes.js";
import { Fault } from "./page_error.js";
import { TILE, countLevels } from "./tile_cache.js";

const THUMB = 48; // pixels along a side of a thumbnail

export function createFileSource() {
  const start = JSON.parse(document.getElementById("regard-start").textContent);
  const entries = new Map([...document.querySelectorAll("script[data-name]")].map((one) => [one.dataset.name, one]));
  const opened = new Map();
  const recording = (r) => start.recordings.find((one) => one.id === r);

  // Return the bytes of an entry, or null if the file has no entry of that name.
  function bytes(name) {
    if (!entries.has(name)) return Promise.resolve(null);
    if (!opened.has(name)) opened.set(name, unpackData(JSON.parse(entries.get(name).textContent)));
    return opened.get(name);
  }

  async function readText(name, otherwise) {
    const found = await bytes(name);
    if (!found) throw new Fault(otherwise);
    return new TextDecoder().decode(found);
  }

  const json = async (name, otherwise) => JSON.parse(await readText(name, otherwise));

  const attentionOf = (r, { kind, part }) => recording(r).attentions.find((one) => one.kind === kind && (one.part ?? "") === (part ?? ""));

  // Return the number of queries, keys and heads at a place.
  function size(r, { kind, part, layer }) {
    return attentionOf(r, { kind, part }).layers[layer];
  }

  // Return the finest picture of a whole head at a level or a coarser one: {level, codes, rows, columns, queries, keys}.
  async function picture(r, place, level, how) {
    const { queries, keys } = size(r, place);
    for (let z = level; z < countLevels(queries, keys); z++) {
      const found = await bytes(`${r}/picture?${formatPlace(place)}&level=${z}&how=${z === 0 ? "mean" : how}`);
      const shape = { rows: Math.ceil(queries / 2 ** z), columns: Math.ceil(keys / 2 ** z) };
      if (found) return { level: z, codes: readCodes(found.buffer), ...shape, queries, keys };
    }
    throw new Fault("This file contains no picture of this head. To see all heads, run `regard serve` with the recording.");
  }

  // Return all weights of a head, if the file contains them.
  async function readPicture(r, place) {
    const found = await picture(r, place, 0, "mean");
    if (found.level === 0) return found;
    throw new Fault("This file contains only coarser pictures of this long text. To see single weights, run `regard serve` with the recording.");
  }

  // Return the codes of the mean over some heads at n places.
  async function mean(r, query, n, at) {
    const heads = query.heads ? String(query.heads).split(",").map(Number) : [query.head];
    const all = await Promise.all(heads.map((head) => readPicture(r, { ...query, head })));
    if (all.length === 1) return Uint16Array.from({ length: n }, (_, i) => at(all[0], i));
    return Uint16Array.from({ length: n }, (_, i) => {
      const seen = all.map((one) => decodeWeight(at(one, i)));
      return seen.every((one) => one === null) ? 0 : encodeWeight(seen.reduce((sum, one) => sum + one, 0) / seen.length);
    });
  }

  // Return functions of the weights of a row and of a column of a head, null where one is hidden: of its scores, or rounded to
  // the digits of the codes.
  async function readWeights(r, place) {
    const { codes, rows, columns } = await readPicture(r, place);
    const kept = await bytes(`${r}/scores?${formatPlace(place)}`);
    const scores = kept && new Float32Array(kept.buffer);
    const sink = await sinkOf(r, place);
    const line = (q, all) => all.subarray(q * columns, (q + 1) * columns);
    const read = (code) => (code ? roundCode(code) : null);
    const row = (q) => (scores ? computeRow(line(q, scores), line(q, codes), sink) : Array.from(line(q, codes), read));
    return { row, column: (k) => Array.from({ length: rows }, (_, q) => (scores ? row(q)[k] : read(codes[q * columns + k]))) };
  }

  // Return the score of the sink of a head, which takes part in each softmax; -Infinity without one.
  async function sinkOf(r, place) {
    const name = `${r}/sink?${formatPlace(place)}`;
    return entries.has(name) ? (await json(name)).score : -Infinity;
  }

  // Return the weights of a row, a column or a tile as numbers, of one head or the mean of several.
  async function exact(r, what, query) {
    if (what === "tile") return exactTile(r, query);
    const heads = query.heads ? String(query.heads).split(",").map(Number) : [query.head];
    const all = await Promise.all(heads.map((head) => readWeights(r, { ...query, head })));
    const lines = all.map((one) => (what === "row" ? one.row(query.q) : one.column(query.k)));
    return lines[0].map((_, n) => averageSeen(lines.map((line) => line[n])));
  }

  async function exactTile(r, { level, row: down, column: across, how, ...place }) {
    const { codes, shape } = cutTile(await picture(r, place, level, how), level, down, across, how);
    if (level) return Array.from(codes, roundCode);
    const { row } = await readWeights(r, place);
    const lines = Array.from({ length: shape[0] }, (_, n) => row(down * TILE + n));
    return Array.from(codes, (_, n) => lines[Math.floor(n / shape[1])][across * TILE + (n % shape[1])] ?? NaN);
  }

  const row = (r, query) => mean(r, query, size(r, query).keys, (one, k) => one.codes[query.q * one.columns + k]);
  const column = (r, query) => mean(r, query, size(r, query).queries, (one, q) => one.codes[q * one.columns + query.k]);

  async function top(r, query) {
    const incoming = query.q === undefined || query.q === null;
    const found = await exact(r, incoming ? "column" : "row", query);
    const places = [...found.keys()].filter((n) => Math.fround(found[n]) > 0).sort((a, b) => found[b] - found[a] || a - b).slice(0, query.n ?? 8);
    const attention = attentionOf(r, query);
    const { words } = await list(r, incoming ? attention.rows : attention.columns, query.b);
    return { found: places.map((place) => ({ place, word: words?.[place] ?? String(place), weight: found[place] })) };
  }

  async function cell(r, { q, k, ...place }) {
    const found = await readPicture(r, place);
    const line = found.codes.subarray(q * found.columns, (q + 1) * found.columns);
    const rest = { of: line.reduce((sum, one) => sum + (one > 0), 0), visible: line[k] > 0 };
    const rank = (larger) => 1 + line.reduce((sum, one, n) => sum + (one > 0 && larger(n)), 0);
    const kept = await bytes(`${r}/scores?${formatPlace(place)}`);
    if (!kept) return { weight: line[k] ? roundCode(line[k]) : null, score: null, rank: rank((n) => line[n] > line[k]), ...rest };
    const scores = new Float32Array(kept.buffer).subarray(q * found.columns, (q + 1) * found.columns);
    if (scores.some(Number.isNaN)) {
      const seen = scores.map((one) => one !== -Infinity);
      return { weight: seen[k] ? null : 0, score: null, rank: null, of: seen.reduce((sum, one) => sum + one, 0), visible: seen[k] > 0 };
    }
    return { ...computeWeight(scores, line, await sinkOf(r, place), k), rank: rank((n) => scores[n] > scores[k]), ...rest }; // codes of weights that are near are equal
  }

  // Return the words of a batch row along an axis; all rows share those that a recording has for one.
  function list(r, name, b) {
    const found = [b ?? 0, 0].map((row) => `${r}/words?list=${name}&b=${row}`).find((one) => entries.has(one));
    return found ? json(found) : Promise.resolve({ words: null });
  }

  return {
    file: true,
    start: async () => start,
    recordings: async () => [], // the file has none but those of its start
    async words(r, { list: name, from, to, b }) {
      const { words } = await list(r, name, b);
      return { words: words.slice(from, to) };
    },
    async *heads(r, { kind, part }) {
      const lines = await readText(`${r}/heads?kind=${kind}&part=${part ?? ""}`, "This file does not contain the kinds of the heads.");
      for (const line of lines.split("\n")) if (line) yield JSON.parse(line);
    },
    async thumbs(r, { kind, part, b, layer }) {
      const count = size(r, { kind, part, layer }).heads;
      const all = await Promise.all(Array.from({ length: count }, (_, head) => picture(r, { kind, part, b, layer, head }, 0, "max")));
      const shape = [count, Math.min(THUMB, all[0].rows), Math.min(THUMB, all[0].columns)];
      return { codes: joinArrays(all.map((one) => poolCodes(one, shape[1], shape[2]))), shape, sampled: false };
    },
    async *open(r, place) {
      yield json(`${r}/open?${formatPlace(place)}`, "This file contains no data of this head.");
    },
    async tile(r, { level, row: down, column: across, how, ...place }) {
      return cutTile(await picture(r, place, level, how), level, down, across, how);
    },
    cell,
    hasRollout: (r, place) => entries.has(nameRollout(r, place)),
    // Return the codes of a row of the rollout up to a layer.
    async rollout(r, { q, ...place }) {
      const { keys } = size(r, place);
      return readCodes((await bytes(nameRollout(r, place))).buffer).subarray(q * keys, (q + 1) * keys);
    },
    // Return the pulls of a row, the mean of some heads, NaN where all of them hide the key.
    async pull(r, { q, heads, ...place }) {
      const { keys, queries, pull: count } = size(r, place);
      const numbers = readNumbers((await bytes(namePull(r, place))).buffer);
      const chosen = count === 1 ? [0] : heads ? String(heads).split(",").map(Number) : [place.head];
      const read = (head, k) => numbers[(head * queries + q) * keys + k];
      return Float32Array.from({ length: keys }, (_, k) => averageSeen(chosen.map((head) => read(head, k)).map((one) => (Number.isNaN(one) ? null : one))));
    },
    async implicit(r, { layer, b, head, how }) {
      const found = await bytes(`${r}/implicit?layer=${layer}&b=${b}&head=${head}&how=${how}`);
      if (!found) throw new Fault("This file does not contain this head. To see all heads, run `regard serve` with the recording.");
      return readNumbers(found.buffer);
    },
    async implicitCell() {
      throw new Fault("This file contains only a coarser picture of this layer. To see single entries, run `regard serve` with the recording.");
    },
    row,
    column,
    exact,
    top,
    async steps(r, place) {
      const found = await json(`${r}/steps?${formatPlace(place)}`, "This file contains no steps of this head, because the text is too long. To see them, run `regard serve` with the recording.");
      if (found.error) throw new Fault(found.error);
      for (const name of ["q", "k", "v"]) if (found[name]) found[name] = readTable(found[name], await bytes(found[name].name));
      return found;
    },
    finding: (r) => json(`${r}/finding`, "This file does not contain what its clearest head is."),
    async example({ name, head }) {
      return json(`example?name=${name}${head ? `&head=${head}` : ""}`, "This file does not contain this example.");
    },
    async type() {
      throw new Fault("A single file cannot run a model. To run one, use `regard serve --model pocket`.");
    },
    async *generate() {
      throw new Fault("A single file cannot run a model. To run one, use `regard serve --model pocket`.");
    },
  };
}

const nameRollout = (r, { kind, part, b, layer }) => `${r}/rollout?kind=${kind}&part=${part ?? ""}&b=${b}&layer=${layer}`;
const namePull = (r, { kind, part, b, layer }) => `${r}/pull?kind=${kind}&part=${part ?? ""}&b=${b}&layer=${layer}`;
const formatPlace = ({ kind, part, b, layer, head }) => `kind=${kind}&part=${part ?? ""}&b=${b}&layer=${layer}&head=${head}`;

// Decode base64 and decompress gzip.
async function unpackData(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Return the rows of a table of little-endian numbers.
function readTable({ bits, columns }, data) {
  const view = new DataView(data.buffer);
  const read = (n) => (bits === 32 ? view.getFloat32(4 * n, true) : view.getFloat64(8 * n, true));
  const rows = (8 * data.byteLength) / (bits * columns);
  return Array.from({ length: rows }, (_, row) => Array.from({ length: columns }, (_, column) => read(row * columns + column)));
}

// Return the weight and score at k of a row of scores.
function computeWeight(scores, line, sink, k) {
  return line[k] ? { weight: computeRow(scores, line, sink)[k], score: scores[k] } : { weight: 0, score: null };
}

// Return the weights of a row of scores, null where one is hidden: all others are NaN where a score is, else have a code.
function computeRow(scores, line, sink) {
  if (scores.some(Number.isNaN)) return Array.from(scores, (one) => (one === -Infinity ? null : NaN));
  let most = sink;
  for (let n = 0; n < line.length; n++) if (line[n]) most = Math.max(most, scores[n]);
  let sum = sink === -Infinity ? 0 : Math.exp(sink - most);
  for (let n = 0; n < line.length; n++) if (line[n]) sum += Math.exp(scores[n] - most);
  return Array.from(line, (code, n) => {
    if (!code) return null;
    const [exact, near] = [Math.exp(scores[n] - most) / sum, decodeWeight(code)];
    const differs = near > 0 && Math.abs(exact / near - 1) > 1e-3; // weights that are not the softmax of the scores
    return differs ? roundCode(code) : exact;
  });
}

// Return the mean of the weights of some heads, NaN where all of them hide the key; one that hides it, by null, has the weight 0.
const averageSeen = (weights) => (weights.every((one) => one === null) ? NaN : weights.reduce((sum, one) => sum + one, 0) / weights.length);

// Cut a tile of a level out of a picture of the whole head at that level or a coarser one.
function cutTile(whole, level, down, across, how) {
  const up = whole.level - level;
  const countPixels = (tokens) => Math.ceil(tokens / 2 ** level);
  const shape = [Math.min(TILE, countPixels(whole.queries) - down * TILE), Math.min(TILE, countPixels(whole.keys) - across * TILE)];
  const found = new Uint16Array(shape[0] * shape[1]);
  for (let r = 0; r < shape[0]; r++) {
    for (let c = 0; c < shape[1]; c++) {
      found[r * shape[1] + c] = whole.codes[((down * TILE + r) >> up) * whole.columns + ((across * TILE + c) >> up)];
    }
  }
  return { codes: found, shape, how };
}

// Reduce a picture to high x wide pixels, each the largest code of those it covers.
function poolCodes({ codes: found, rows, columns }, high, wide) {
  const small = new Uint16Array(high * wide);
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      const at = Math.floor(((r + 0.5) * high) / rows) * wide + Math.floor(((c + 0.5) * wide) / columns);
      small[at] = Math.max(small[at], found[r * columns + c]);
    }
  }
  return small;
}

function joinArrays(all) {
  const whole = new Uint16Array(all.length * all[0].length);
  all.forEach((one, n) => whole.set(one, n * one.length));
  return whole;
}
