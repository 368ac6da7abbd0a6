"""The arguments of `regard atlas`."""

import argparse

EPILOG = """\
The corpus is a text file, a folder of .txt, .md or .jsonl files, or one of
them. Documents are cut into pieces of at most --tokens tokens. FOLDER gets
heads.parquet and four more tables, and site/index.html, pages that need no
server.

The same command continues a run that was stopped. --shard 0/4 to 3/4 divide
the work among machines that share FOLDER; the one that ends last writes the
result, and so does regard atlas merge --out FOLDER.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard atlas`."""
    parser.add_argument("action", metavar="merge", nargs="?", choices=("merge",), help="only merge the shards in FOLDER")
    parser.add_argument("--model", metavar="NAME", help="pocket, smollm2, a folder, a .gguf file or a name on the hub")
    parser.add_argument("--on", metavar="CORPUS", help="the texts: a file or a folder")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="the folder of the atlas")
    parser.add_argument("--documents", metavar="N", type=int, help="the first N pieces of the corpus (all)")
    parser.add_argument("--tokens", metavar="N", type=int, help="the most tokens of a piece (1024, or the model's context)")
    parser.add_argument("--queries", metavar="N", type=int, help="queries of each piece that are scored, evenly spaced (64)")
    parser.add_argument("--examples", metavar="N", type=int, help="top examples of each score of a head (5)")
    parser.add_argument("--shard-size", metavar="N", type=int, help="pieces in a shard (8)")
    parser.add_argument("--shard", metavar="I/N", help="compute every N-th shard from the I-th, from 0")
    parser.add_argument("--engine", choices=("local", "ray"), help="compute in this process, or by Ray on a cluster (local)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the heads as JSON: layer, head, kind, sentence, scores; null until all shards are there",
    )
