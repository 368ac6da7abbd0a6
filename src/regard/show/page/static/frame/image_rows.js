// The batch rows of the map of a layer that reads images: each image, or each text with images, has one, or one for each window.

// Return the number of windows of an image that are batch rows of their own.
export const countWindows = ({ grids }, layer) => grids?.[layer.grids?.[0]]?.order?.length ?? 1;

// Return the number of images, or of texts with images, in the batch.
export const countImageRows = (summary, layer) => Math.max(Math.floor((layer.batch ?? 1) / countWindows(summary, layer)), 1);

// Return the number of the one that a state names.
export const findImageRow = (summary, layer, state) => Math.min(Math.floor((state.b ?? 0) / countWindows(summary, layer)), countImageRows(summary, layer) - 1);
