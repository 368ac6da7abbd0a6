// The patches of an image along the axes of a layer: which token is which patch, in which window, and the names of the others.

export const NONE = -1; // the patch of a token that is none
const CLASS_TOKEN = "class token"; // among the names of a grid

// Return the number of tokens that a grid takes in a window.
const countTokens = ({ rows, columns, order }) => order?.[0].length ?? rows * columns;

// Create the grid of one of the images of a layer with a number of queries and keys; `isCrossAttention` states whether the
// queries are words of another text, `grids` are those of all images of the layer.
export function createPatchGrid(grid, { queries, keys }, isCrossAttention, grids = [grid]) {
  const isCross = isCrossAttention || grid.has_queries === false; // queries of pooled keys are other tokens too
  const { rows, columns, start, order, names } = grid;
  const [top, left, bottom, right] = grid.extent ?? [0, 0, 1, 1]; // shares of the image
  const windows = order?.length ?? 1;
  const patches = Array.from({ length: windows }, () => new Int32Array(keys).fill(NONE)); // of each key, by window
  const places = new Array(rows * columns); // of each patch: its window and key
  for (let w = 0; w < windows; w++) {
    const own = order?.[w] ?? Array.from({ length: rows * columns }, (_, n) => n);
    own.forEach((patch, n) => {
      patches[w][start + n] = patch;
      if (patch !== NONE) places[patch] = { window: w, key: start + n };
    });
  }
  const first = keys - queries; // the key of the first query
  const spans = grids.filter((one) => (one.order?.length ?? 1) === 1); // tokens between the patches of an image, such as the ends of its rows, are none of the text
  const isInImage = (key) => spans.some((one) => key >= one.start && key < one.start + countTokens(one));
  return {
    rows,
    columns,
    windows,
    patches,
    isCross,
    // Return where a column or a row begins, as a share of the image.
    xOf: (column) => left + ((right - left) * column) / columns,
    yOf: (row) => top + ((bottom - top) * row) / rows,
    // Return the patch at a place in the image, as shares of it, or null where it has none.
    findPatch(x, y) {
      const [column, row] = [Math.floor(((x - left) / (right - left)) * columns), Math.floor(((y - top) / (bottom - top)) * rows)];
      return column < 0 || column >= columns || row < 0 || row >= rows ? null : row * columns + column;
    },
    // Return the key at a query's own position; of cross attention the query itself.
    keyOf: (q) => (isCross ? q : q + first),
    // Return the patch of a query in a window, or NONE.
    patchOf: (q, window) => (isCross ? NONE : patches[window]?.[q + first] ?? NONE),
    // Return the window and the key of a patch, or undefined if it is no key.
    findKey: (patch) => places[patch],
    // Return the query and the window of a patch, or null if it is only a key.
    findQuery(patch) {
      const { window, key } = places[patch] ?? {};
      return isCross || key === undefined || key < first ? null : { q: key - first, window };
    },
    // Return the queries that are no patches of any image of the layer.
    others: () => Array.from({ length: queries }, (_, q) => q).filter((q) => isCross || (patches[0][q + first] === NONE && !isInImage(q + first))),
    // Return the name of a key: the row and column of its patch, or the name of the token; null for a word.
    nameKey(key, window = 0) {
      const patch = patches[window][key];
      return patch === NONE ? names[key] ?? null : namePatch(patch, columns);
    },
    // Return the query that is shown first: the class token, the middle patch where all tokens are patches, or the last word.
    chooseQuery() {
      if (!isCross && queries < keys) return { q: queries - 1, window: 0 }; // the first keys are those of a cache
      const middle = () => this.findQuery(Math.floor(rows / 2) * columns + Math.floor(columns / 2));
      const arePatches = windows > 1 || keys === grids.reduce((sum, one) => sum + countTokens(one), 0);
      if (!isCross && (arePatches || (names.length && names[0] !== CLASS_TOKEN))) return middle();
      const isFirst = !isCross && (names.length || (grids.length === 1 && start + countTokens(grid) === keys));
      return { q: isFirst ? 0 : queries - 1, window: 0 };
    },
  };
}

export const namePatch = (patch, columns) => `patch ${Math.floor(patch / columns)},${patch % columns}`;

// Return the patch beside another one, or the same at an edge.
export function stepPatch({ rows, columns }, patch, down, right) {
  const [row, column] = [Math.floor(patch / columns) + down, (patch % columns) + right];
  return row < 0 || row >= rows || column < 0 || column >= columns ? patch : row * columns + column;
}
