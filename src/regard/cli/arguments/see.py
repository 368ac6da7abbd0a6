"""The arguments of `regard see`."""

import argparse

MODEL = "digits"  # the default

EPILOG = """\
IMAGE is a PNG, a JPEG or another file that Pillow reads. The model runs
unchanged; queries and keys are recorded, and every number is computed from
them. --page writes a page on which you hover a patch to see where it looks
and, of a model with classes, how that moved the logit of its answer.

With --text, the model is one of images and words, such as LLaVA: shown is
what each word of the prompt looks at in the image, and layers are those of
its language model. --head also takes the path of a layer of its part that
reads images, which is all that runs without --text.

The columns are means over the patches and the heads of a layer, of the
attention of a patch:
  dist     how many patches away it looks
  itself   on itself
  others   on tokens that are no patches: a class token, registers
  patches  at how many patches it looks (e to the entropy)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard see`."""
    parser.add_argument("image", metavar="IMAGE", help="an image file; for the model digits also a digit, 0 to 9")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        default=MODEL,
        help="a model of images of transformers: folder or name on the hub; or digits, which is included (digits)",
    )
    parser.add_argument("--text", metavar="PROMPT", help="a question about the image: what its words look at in it")
    parser.add_argument("--tokens", metavar="N", type=int, default=0, help="with --text: words that the model adds (0)")
    parser.add_argument("--query", metavar="WORD", help="with --text: one word, or the token with a number (all words)")
    parser.add_argument("--head", metavar="L.H", help="head H of layer L; layer L or its path: mean of its heads (the last)")
    parser.add_argument("--patch", metavar="R,C", help="what the patch in row R and column C looks at (the class token)")
    parser.add_argument("--rollout", action="store_true", help="the rollout through all layers up to that of --head")
    parser.add_argument("--out", metavar="FILE", help="save the recording")
    parser.add_argument("--page", metavar="FILE", help="write a page for the browser: one .html file, no network")
    parser.add_argument("--figure", metavar="FILE", help="save the picture of that query: .png, .pdf or .svg")
