"""The arguments of each command: parsed, checked and explained by --help without PyTorch, which takes seconds to import."""

COMMANDS = {  # with what each does: --help of all needs no other module
    "walk": "show each step of attention with its formula, numbers and an explanation, on an example or your own words.",
    "look": "show what the attention of a model does on a text: the kind of each head, and the strongest links.",
    "see": "show what a model looks at in an image: each layer in numbers, and one query as a picture.",
    "heads": "show the kind of each head of a saved recording, or of a language model, which is probed.",
    "atlas": "score every head of a model over many documents, in shards, as tables and pages.",
    "audit": "measure what policies of cache compression and sparse attention drop from a model's attention.",
    "serve": "show a recording, or a model and the text you type, on a page in the browser.",
    "generate": "continue a text with a model, token by token; show likely alternatives, and what each token looked at.",
    "train": "train a GPT-2 from scratch on a text of your own; the same command resumes a run.",
    "evaluate": "measure how well a model predicts a text: perplexity by token, word and byte; the last words of LAMBADA.",
    "translate": "translate sentences, score translations against human ones, or train a translator from scratch.",
    "examine": "check whether the attention of a layer, a function or a whole model is correct, and report what is wrong.",
    "verify": "recompute every number that the lectures print.",
    "info": "show the machine, the versions, the kernels that regard uses on it, and which extras are installed.",
}
