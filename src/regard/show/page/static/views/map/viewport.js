// Where one stands over the plane of queries (down) and keys (across): a centre in tokens and pixels for each token.

const CLOSEST = 96; // pixels for a token

// A camera over a plane of keys x queries; room() is the rectangle {x, y, width, height} that it may fill on screen.
export function createViewport(keys, queries, room) {
  const here = { x: keys / 2, y: queries / 2, zoom: 1 }; // zoom: how many times larger than the whole

  const whole = () => Math.min(room().width / keys, room().height / queries, CLOSEST);
  const pixels = () => whole() * here.zoom;
  const most = () => Math.max(1, CLOSEST / whole());

  function settle() {
    here.zoom = Math.min(Math.max(here.zoom, 1), most());
    if (here.zoom === 1) Object.assign(here, { x: keys / 2, y: queries / 2 });
    here.x = Math.min(Math.max(here.x, 0), keys); // the middle of the screen stays on the plane
    here.y = Math.min(Math.max(here.y, 0), queries);
  }

  return {
    here,
    pixels,
    settle,
    // Pixels on screen of a place in tokens, and back.
    across: (key) => room().x + room().width / 2 + (key - here.x) * pixels(),
    down: (query) => room().y + room().height / 2 + (query - here.y) * pixels(),
    key: (x) => here.x + (x - room().x - room().width / 2) / pixels(),
    query: (y) => here.y + (y - room().y - room().height / 2) / pixels(),
    pan(dx, dy) {
      here.x -= dx / pixels();
      here.y -= dy / pixels();
      settle();
    },
    // Zooms so that what lies under a point stays there.
    zoom(factor, x, y) {
      const [key, query] = [this.key(x), this.query(y)];
      here.zoom = Math.min(Math.max(here.zoom * factor, 1), most());
      here.x += key - this.key(x);
      here.y += query - this.query(y);
      settle();
    },
    all() {
      Object.assign(here, { x: keys / 2, y: queries / 2, zoom: 1 });
    },
    // Moves no further than needed to see a token.
    show(key, query) {
      const [w, h] = [room().width / pixels() / 2, room().height / pixels() / 2];
      if (key !== undefined) here.x = Math.min(Math.max(here.x, key + 1 - w), key + w);
      if (query !== undefined) here.y = Math.min(Math.max(here.y, query + 1 - h), query + h);
      settle();
    },
  };
}
