// The words of one batch row of a recording, fetched and cached in pages.

const PAGE = 2000;

// words(list, from, to) fetches words, word(list, place) returns a word that is fetched already, count(list) their number.
export function createWordPages(source, summary, b = 0) {
  const lists = summary.words ?? {};
  const pages = new Map(); // "list page" -> its words, or a promise of them

  for (const [list, { first }] of Object.entries(lists)) {
    if (b === 0 && first.length >= Math.min(PAGE, lists[list].count)) pages.set(`${list} 0`, first.slice(0, PAGE));
  }

  async function page(list, n) {
    const name = `${list} ${n}`;
    if (!pages.has(name)) {
      const to = Math.min((n + 1) * PAGE, lists[list].count);
      const asked = source.words(summary.id, { list, from: n * PAGE, to, b: b || null }).then((answer) => answer.words);
      pages.set(name, asked);
      asked.then((words) => pages.set(name, words), () => pages.delete(name)); // a failed request can be repeated
    }
    return pages.get(name);
  }

  return {
    count: (list) => lists[list]?.count ?? 0,
    known: (list) => list in lists,
    async words(list, from, to) {
      if (!(list in lists)) return Array.from({ length: to - from }, (_, n) => String(from + n));
      const found = [];
      for (let n = Math.floor(from / PAGE); n * PAGE < to; n++) {
        const words = await page(list, n);
        for (let place = Math.max(from, n * PAGE); place < Math.min(to, (n + 1) * PAGE); place++) found.push(words[place - n * PAGE] ?? "");
      }
      return found;
    },
    word(list, place) {
      if (!(list in lists)) return String(place);
      const words = pages.get(`${list} ${Math.floor(place / PAGE)}`);
      return Array.isArray(words) ? (words[place % PAGE] ?? "") : undefined;
    },
  };
}
