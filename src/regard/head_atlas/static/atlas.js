// The index of an atlas: colors the grid by a score, and lists the heads of a kind whose examples contain a text.

const SHOWN = 60; // heads in the list, until more are asked for
const UNBOUNDED = ["distance", "keys", "entropy"];
const controls = Object.fromEntries(["score", "kind", "text"].map((name) => [name, document.getElementById(name)]));
const cells = [...document.querySelectorAll(".grid a")];

function findExample(head, text) {
  return head.texts.find((one) => one.toLowerCase().includes(text.toLowerCase()));
}

function selectHeads() {
  const { kind, text } = controls;
  return ATLAS.heads.map((head) => (!kind.value || head.kind === kind.value) && (!text.value || findExample(head, text.value) !== undefined));
}

function colorGrid(chosen) {
  const score = controls.score.value;
  const values = ATLAS.heads.map((head) => head.scores[score]);
  const largest = Math.max(...values.filter(Number.isFinite), 1e-9);
  const most = UNBOUNDED.includes(score) || largest > 1 ? largest : 1;
  cells.forEach((cell, n) => {
    cell.style.setProperty("--share", Math.min(Math.max((values[n] ?? 0) / most, 0), 1));
    cell.classList.toggle("out", !chosen[n]);
    cell.title = `${ATLAS.heads[n].name}: ${score} ${formatNumber(values[n])}. ${ATLAS.heads[n].sentence}`;
  });
  document.getElementById("largest").textContent = formatNumber(most);
}

function formatNumber(x) {
  return x === null || x === undefined ? "unknown" : x.toPrecision(3).replace(/e\+?/, "e");
}

function makeElement(name, ...children) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}

function markText(example, text) {
  const at = example.toLowerCase().indexOf(text.toLowerCase());
  const start = Math.max(0, at - 60);
  const parts = [start ? "…" : "", example.slice(start, at), makeElement("b", example.slice(at, at + text.length)), example.slice(at + text.length, at + text.length + 40)];
  const line = makeElement("span", ...parts);
  line.className = "found";
  return line;
}

function listHeads(chosen) {
  const score = controls.score.value;
  const heads = ATLAS.heads.filter((_, n) => chosen[n]).sort((a, b) => (b.scores[score] ?? -Infinity) - (a.scores[score] ?? -Infinity));
  const rows = heads.slice(0, SHOWN).map((head) => {
    const link = makeElement("a", head.name);
    link.href = `${head.name}.html`;
    const what = makeElement("td", head.sentence);
    if (controls.text.value) what.append(markText(findExample(head, controls.text.value), controls.text.value));
    return makeElement("tr", makeElement("td", link), makeElement("td", head.kind), makeElement("td", formatNumber(head.scores[score])), what);
  });
  document.getElementById("rows").replaceChildren(...rows);
  const more = heads.length > SHOWN ? `, of which ${SHOWN} are listed` : "";
  document.getElementById("count").textContent = heads.length ? `${heads.length} of ${ATLAS.heads.length} heads${more}, by ${score}.` : "No head has an example that contains this text, or is of this kind.";
}

function update() {
  const chosen = selectHeads();
  colorGrid(chosen);
  listHeads(chosen);
  const state = new URLSearchParams(Object.entries(controls).filter(([, control]) => control.value).map(([name, control]) => [name, control.value]));
  history.replaceState(null, "", `#${state}`);
}

for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  if (controls[name]) controls[name].value = value;
}
if (!controls.score.value) controls.score.selectedIndex = 0;
Object.values(controls).forEach((control) => control.addEventListener("input", update));
update();
