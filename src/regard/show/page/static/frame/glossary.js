// The words of the page in plain language: the titles of its controls, and what "?" explains of each view.

export const TERMS = {
  "marks in tokens": "A thin line is a space, ↵ a line end, and a number in a box a character that cannot be seen.",
  layer: "A model has several layers; each computes on the output of the previous one.",
  head: "Each layer has several heads, and each head has its own attention weights.",
  "head of these layers": "Each head has a matrix of its own. Layers without heads have one for each of their channels.",
  weight: "The share of a token’s attention that another token gets; the shares of a token add up to 1.",
  carried: "How much a token passes on: its weight times the length of what it has to give, its value after the output projection.",
  pull: "How the weight moved the logit, the score of the next token: + raised it, − lowered it. It is the weight times the gradient.",
  "pull on a number": "How each weight moved the number that was given with the page, such as a logit: + raised it, − lowered it. It is the weight times the gradient.",
  cut: "How the logit of the next token would change, to first order, if the one token could not see the other.",
  logit: "The score that a token has as the next one: the higher, the more probable. It is chosen where pull and cut are shown.",
  "skip first token": "Take the first token out: many heads attend to it when they have nothing to add. Each weight becomes its share of the attention on the other tokens, in the colors and in the scores.",
  "head off": "Set the output of the head to 0, and see in Type what the model predicts without it.",
  "log, linear": "The scale of the colors: linear shows the large numbers, log also the small ones.",
  "mean, max": "What a pixel that covers many weights shows: their mean, or the largest.",
  "mean, largest": "What a pixel that covers many entries shows: their mean with its sign, or the entry that is largest in size.",
  "no softmax": "State spaces, linear attention, delta rules and short convolutions mix the values of tokens without a softmax. Their entries are no shares of attention.",
  "spread of each row": "The number of tokens that would have the same entropy if the attention on them were even: 1 where all is on one token. Entropy is its logarithm, in nats.",
  score: "q · k / √d, how well the query and the key fit; the softmax of the scores of a row gives its weights.",
  rank: "The place of the weight among those of its row, the largest first.",
  mask: "What a token may see: causal hides the tokens that come later.",
  "divide by √d": "Divide the scores by the root of their width d, so that they do not grow with it.",
  temperature: "What the scores are divided by: below 1 the largest weights grow, above 1 all become more even.",
  "sort by": "The order of the heads: as in the model, or by a score.",
  "Probe the model": "Run the model on random tokens that are repeated: what its heads do on any text, not only on this one.",
  "Who may see whom?": "Change each token in turn, and see which others notice: none may notice a token that comes later.",
  rollout: "The weights of all layers up to this one together: how much each patch counts for the selected one, where half of each layer passes on what it got.",
  tokens: "The maximum number of tokens to write. A token is a word, a piece of one, or a character.",
  "temperature of sampling": "0 always takes the likeliest token, 1 draws tokens by the model’s probabilities, 2 by flatter ones.",
  seed: "The start of the random numbers: the same seed writes the same tokens.",
  "as a chat": "Put the prompt into the model’s own chat template, as a message that it answers.",
};

const SHOWN = ["weight", "carried", "pull", "cut", "logit"];
const OF_VIEWS = {
  type: ["marks in tokens", "layer", "head", ...SHOWN, "skip first token"],
  image: ["layer", "head", "rollout", "pull on a number"],
  text: ["marks in tokens", "layer", "head", ...SHOWN, "head off", "skip first token", "log, linear"],
  heads: ["Probe the model", "Who may see whom?", "sort by", ...SHOWN, "skip first token", "log, linear"],
  map: ["marks in tokens", "layer", "head", "mean, max", "spread of each row", "score", "rank", ...SHOWN, "head off", "skip first token", "log, linear"],
  implicit: ["no softmax", "layer", "head of these layers", "mean, largest", "log, linear"],
  steps: ["marks in tokens", "layer", "head", "mask", "divide by √d", "temperature", ...SHOWN],
  compare: ["marks in tokens", "layer", "head", ...SHOWN, "log, linear"],
  generate: ["marks in tokens", "tokens", "temperature of sampling", "seed", "as a chat", ...SHOWN],
};

const OF_TEXTS = ["marks in tokens", "pull", "cut", "logit", "Probe the model"]; // what they speak of are tokens of a text on every page

// List the words of the shown view with what they mean: [[word, text]].
export function listTerms(app) {
  const inUnits = (name, text) => (OF_TEXTS.includes(name) ? text : app.inUnits(text));
  return OF_VIEWS[app.state().view].map((name) => [inUnits(name, name === "temperature of sampling" ? "temperature" : name), inUnits(name, TERMS[name])]);
}
