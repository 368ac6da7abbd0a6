// What every word did to a generated word, as the server computes it, once for each word and setting.

const REST = 100; // milliseconds that a word is shown before the model is run for it

// Create the store of the influences.
export function createInfluences(app) {
  const known = new Map();
  let [timer, asking] = [null, null];

  async function fetchOne({ id }, { place, token }, show, signal) {
    const key = JSON.stringify([id, place, token, show]);
    if (!known.has(key)) {
      const found = await app.source.influence(id, { show, at: place - 1, token }, signal);
      known.set(key, { ...found, setting: show });
    }
    return known.get(key);
  }

  // Load the numbers {numbers, heads} of a setting and those of what moved the word, its pull by default; call show with both.
  function load(summary, line, setting, show) {
    clearTimeout(timer);
    asking?.abort();
    const { signal } = (asking = new AbortController());
    const fetch = async () => {
      app.wait(`Running ${app.start.model}`);
      try {
        const [shown, moved] = await Promise.all([setting, setting === "weight" ? "pull" : setting].map((one) => fetchOne(summary, line, one, signal)));
        if (signal.aborted) return;
        app.ready();
        show({ shown, moved });
      } catch (fault) {
        if (fault.name === "AbortError") return;
        app.ready();
        app.fail(fault.message);
      }
    };
    timer = setTimeout(fetch, REST);
  }

  const leave = () => (clearTimeout(timer), asking?.abort());
  return { load, leave };
}
