// What a view shows as a table: CSV, JSON, and the HTML that embeds the page in another one.

// Format records as CSV with the columns of all of them (RFC 4180).
export function formatCsv(records) {
  const columns = [...new Set(records.flatMap(Object.keys))];
  const quote = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...records.map((one) => columns.map((name) => one[name]))].map((line) => line.map(quote).join(",")).join("\r\n") + "\r\n";
}

const PRECISION = "Weights have the digits of a float32, or four digits where a file holds no scores of its heads and in a rollout.";

// Format records as JSON, with what they are and the link to it; numbers that JSON does not have are text.
export function formatJson(view, caption, link, records) {
  const keep = (_, value) => (typeof value === "number" && !Number.isFinite(value) ? String(value) : value);
  return JSON.stringify({ view, caption, link, precision: PRECISION, rows: records }, keep, 1) + "\n";
}

// Write the HTML that shows the page in a frame, in the state of its link. A file is named as it lies next to the other page.
export function writeEmbedding(place, title) {
  const address = (place.protocol === "file:" ? place.pathname.split("/").at(-1) : place.origin + place.pathname) + place.hash;
  const quote = (text) => text.replaceAll("&", "&amp;").replaceAll('"', "&quot;").replaceAll("<", "&lt;");
  return `<iframe src="${quote(address)}" title="${quote(title)}" sandbox="allow-scripts allow-downloads" loading="lazy" style="width: 100%; height: 40rem; border: 0"></iframe>`;
}
