// The viewport over the plane of queries (down) and keys (across): a center in tokens, and a zoom.

const CLOSEST = 96; // maximum pixels per token

// Create a camera over a plane of keys x queries; room() is its rectangle {x, y, width, height} on screen.
export function createViewport(keys, queries, room) {
  const here = { x: keys / 2, y: queries / 2, zoom: 1 }; // zoom: magnification relative to the whole plane

  const fitPixels = () => Math.min(room().width / keys, room().height / queries, CLOSEST);
  const pixels = () => fitPixels() * here.zoom;
  const most = () => Math.max(1, CLOSEST / fitPixels());

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
    // Convert a place in tokens to pixels on screen, and back.
    across: (key) => room().x + room().width / 2 + (key - here.x) * pixels(),
    down: (query) => room().y + room().height / 2 + (query - here.y) * pixels(),
    key: (x) => here.x + (x - room().x - room().width / 2) / pixels(),
    query: (y) => here.y + (y - room().y - room().height / 2) / pixels(),
    pan(dx, dy) {
      here.x -= dx / pixels();
      here.y -= dy / pixels();
      settle();
    },
    // Zoom around a point on screen.
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
    // Move the least distance that makes a token visible.
    show(key, query) {
      const [w, h] = [room().width / pixels() / 2, room().height / pixels() / 2];
      if (key !== undefined) here.x = Math.min(Math.max(here.x, key + 1 - w), key + w);
      if (query !== undefined) here.y = Math.min(Math.max(here.y, query + 1 - h), query + h);
      settle();
    },
  };
}
