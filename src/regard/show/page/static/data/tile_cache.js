// A cache of the tiles of one head, which are fetched on demand and colored when they are drawn.

export const TILE = 256;
const KEPT = 240; // maximum number of tiles, of 400 kB each
const AT_ONCE = 4; // concurrent requests; few, so that new requests do not wait for old ones

// Return the number of levels of a map; the last level is a single tile.
export function countLevels(queries, keys) {
  let count = 1;
  while (Math.ceil(Math.max(queries, keys) / 2 ** (count - 1)) > TILE) count++;
  return count;
}

// Create a cache of tiles by [level, row, column]; fetch(query, signal) returns a tile, measure(codes)
// its largest number, and arrived() is called after each.
export function createTileCache(fetch, measure, arrived, failed) {
  const kept = new Map(); // name -> {codes, shape, top, canvas, paint}
  const asked = new Map(); // name -> AbortController
  const broken = new Set();
  let wanted = [];

  async function get([level, row, column]) {
    const name = `${level} ${row} ${column}`;
    const control = new AbortController();
    asked.set(name, control);
    try {
      const { codes, shape } = await fetch({ level, row, column }, control.signal);
      kept.set(name, { codes, shape, top: measure(codes), canvas: null, paint: null });
      for (const old of [...kept.keys()].slice(0, Math.max(0, kept.size - KEPT))) kept.delete(old);
      arrived();
    } catch (fault) {
      if (fault.name === "AbortError") return;
      broken.add(name);
      failed(fault);
    } finally {
      asked.delete(name);
      next();
    }
  }

  function next() {
    while (asked.size < AT_ONCE) {
      const place = wanted.find((one) => !kept.has(one.join(" ")) && !asked.has(one.join(" ")) && !broken.has(one.join(" ")));
      if (!place) return;
      get(place);
    }
  }

  return {
    // Request these tiles in this order, and abort all other requests.
    want(places) {
      wanted = places;
      const names = new Set(places.map((place) => place.join(" ")));
      for (const [name, control] of asked) if (!names.has(name)) control.abort();
      next();
    },
    // Return a cached tile or undefined, and mark it as the most recently used.
    at(level, row, column) {
      const name = `${level} ${row} ${column}`;
      const tile = kept.get(name);
      if (tile) kept.delete(name), kept.set(name, tile);
      return tile;
    },
    waiting: () => wanted.some((one) => !kept.has(one.join(" ")) && !broken.has(one.join(" "))),
    leave() {
      wanted = [];
      for (const control of asked.values()) control.abort();
    },
  };
}

// Draw a tile on a canvas; paint(code) is the value of a pixel.
export function colorTile(tile, paint) {
  if (tile.paint === paint) return tile.canvas;
  const [rows, columns] = tile.shape;
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let n = 0; n < pixels.length; n++) pixels[n] = paint(tile.codes[n]);
  tile.canvas ??= Object.assign(document.createElement("canvas"), { width: columns, height: rows });
  tile.canvas.getContext("2d").putImageData(image, 0, 0);
  tile.paint = paint;
  return tile.canvas;
}
