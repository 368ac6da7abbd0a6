// The ids of the recordings that this visitor made, which the browser keeps: a server does not list those of others.

const KEY = "regard-recordings";
const MOST = 32;

// Create the list; without a storage that can be written it lasts as long as the page.
export function createOwnRecordings() {
  let ids = [];

  function read() {
    try {
      const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
      return Array.isArray(found) ? found.filter((one) => typeof one === "string") : [];
    } catch {
      return ids;
    }
  }

  function write(next) {
    ids = next.slice(-MOST);
    try {
      localStorage.setItem(KEY, JSON.stringify(ids));
    } catch {
      // the list lasts as long as the page
    }
  }

  return {
    list: read,
    set: write,
    add: (id) => write([...read().filter((one) => one !== id), id]), // another tab may have added some
    clear: () => write([]),
  };
}
