// Which layer without a softmax a state shows, and whether a pixel of its pictures covers several entries.

// Return the layer without a softmax of a state.
export const chooseImplicitLayer = (summary, { mixer }) => summary?.implicit?.[mixer];

// Return whether a pixel covers several entries.
export const isPooled = ({ rows, columns, queries, keys }) => rows < queries || columns < keys;
