// The batch rows of the map of a layer that reads images: each image, or each text with images, has one, or one for each window.

// Return the number of windows of an image that are batch rows of their own.
export const countWindows = ({ grids }, layer) => grids?.[layer.grids?.[0]]?.order?.length ?? 1;

// Return the number of images, or of texts with images, in the batch.
export const countImageRows = (summary, layer) => Math.max(Math.floor((layer.batch ?? 1) / countWindows(summary, layer)), 1);

// Return the number of the one that a state names.
export const findImageRow = (summary, layer, state) => Math.min(Math.floor((state.b ?? 0) / countWindows(summary, layer)), countImageRows(summary, layer) - 1);

// Return the number of images of a text, by the last attention that sees images: the parts before it read them one by one.
// It is null where no text is known to read them: only one part sees them, as in a ViT, or a decoder has one row for each image.
function countTextImages(summary) {
  const seeing = summary.attentions.map(({ kind, part, layers }) => ({ kind, part, layer: layers.findLast(({ grids }) => grids) })).filter(({ layer }) => layer);
  const [first, last] = [seeing[0], seeing.at(-1)];
  const isText = last.kind === "self" ? last.part !== first.part : countImageRows(summary, last.layer) > countImageRows(summary, first.layer);
  return isText ? last.layer.grids.length : null;
}

// Return the number of an image of a batch row among all that the page has; several rows of a text, as its beams, share those of the text.
export function findImage(summary, layer, row, number) {
  const [given, ofText, ofRow] = [summary.images.length, countTextImages(summary), layer.grids.length];
  const [read, place] = [countImageRows(summary, layer) * ofRow, row * ofRow + number];
  if (!ofText || read % given || given % ofText) return place;
  return Math.floor((place * given) / (read * ofText)) * ofText + (place % ofText);
}
