"""The tables of an atlas as Parquet files: heads, histograms, positions, distances and examples."""

import importlib
from collections.abc import Iterator
from typing import Any

from regard.atomic_write import write_atomically
from regard.errors import ConfigError
from regard.head_atlas.atlas import Atlas
from regard.head_atlas.documents import DocumentStore
from regard.head_atlas.sampled_rows import DISTANCE_EDGES, SCORES
from regard.head_atlas.statistics import EXAMPLES, POSITIONS, get_edges
from regard.observe.head_table import Heads, make_line

Line = dict[str, Any]
CONTEXT = 48  # tokens of an example's text


def write_tables(atlas: Atlas, documents: DocumentStore, table: Heads) -> None:
    """Write the five tables into the folder of the atlas, all or none. Raises ConfigError if pyarrow is not installed.

    - heads: a line for each head, as `Heads.to_pandas` has it.
    - histograms: layer, head, score, low, high and queries, of each bin that is not empty.
    - positions: layer, head, score, first, last (positions), queries, and the mean of their scores.
    - distances: layer, head, nearest, farthest (tokens back, negative for later ones), keys, and the mean weight of a key.
    - examples: layer, head, score, rank, value, document, query, key, weight, and the texts before the query, of the query and
      of the key that it attends to most.
    """
    arrow, parquet = import_arrow()
    lines = {
        "heads": [make_line(row) for row in table],
        "histograms": list(iterate_histograms(atlas, table)),
        "positions": list(iterate_positions(atlas, table)),
        "distances": list(iterate_distances(atlas, table)),
        "examples": list(iterate_examples(atlas, documents, table)),
    }
    with write_atomically(*(atlas.folder / f"{name}.parquet" for name in lines)) as places:
        for place, rows in zip(places, lines.values(), strict=True):
            parquet.write_table(arrow.Table.from_pylist(rows), place)


def import_arrow() -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError("an atlas needs pyarrow: pip install 'regard[atlas]'.") from None


def iterate_histograms(atlas: Atlas, table: Heads) -> Iterator[Line]:
    """Yield the lines of the table "histograms"."""
    histogram = atlas.state["histogram"].tolist()
    for n, row in enumerate(table):
        for place, score in enumerate(SCORES):
            edges = get_edges(score).tolist()
            for low, high, queries in zip(edges[:-1], edges[1:], histogram[place][n], strict=True):
                if queries:
                    yield {"layer": row.layer, "head": row.head, "score": score, "low": low, "high": high, "queries": queries}


def iterate_positions(atlas: Atlas, table: Heads) -> Iterator[Line]:
    """Yield the lines of the table "positions"."""
    sums, counts = (atlas.state[name].tolist() for name in ("position_sums", "position_counts"))
    for n, row in enumerate(table):
        for place, score in enumerate(SCORES):
            for position in range(POSITIONS):
                if queries := counts[place][n][position]:
                    yield {
                        "layer": row.layer,
                        "head": row.head,
                        "score": score,
                        "first": 2**position // 2,
                        "last": 2**position - 1,
                        "queries": queries,
                        "mean": sums[place][n][position] / queries,
                    }


def iterate_distances(atlas: Atlas, table: Heads) -> Iterator[Line]:
    """Yield the lines of the table "distances"."""
    sums, counts, edges = (
        atlas.state["distance_sums"].tolist(),
        atlas.state["distance_counts"].tolist(),
        DISTANCE_EDGES.tolist(),
    )
    for n, row in enumerate(table):
        for nearest, after, total, keys in zip(edges[:-1], edges[1:], sums[n], counts[n], strict=True):
            if keys:
                yield {
                    "layer": row.layer,
                    "head": row.head,
                    "nearest": nearest,
                    "farthest": after - 1,
                    "keys": keys,
                    "mean": total / keys,
                }


def iterate_examples(atlas: Atlas, documents: DocumentStore, table: Heads) -> Iterator[Line]:
    """Yield the lines of the table "examples"."""
    names = ("example_scores", "example_documents", "example_queries", "example_keys", "example_weights")
    scores, numbers, queries, keys, weights = (atlas.state[name].tolist() for name in names)
    for n, row in enumerate(table):
        for place, score in enumerate(EXAMPLES):
            for rank, value in enumerate(scores[place][n]):
                if value > 0:
                    document, query = numbers[place][n][rank], queries[place][n][rank]
                    ids = documents[document].tolist()
                    yield {
                        "layer": row.layer,
                        "head": row.head,
                        "score": score,
                        "rank": rank,
                        "value": value,
                        "document": document,
                        "query": query,
                        "keys": keys[place][n][rank],
                        "weights": weights[place][n][rank],
                        "text": "".join(documents.pieces[token] for token in ids[: query + 1][-CONTEXT:]),
                        "query_text": documents.pieces[ids[query]],
                        "key_text": documents.pieces[ids[keys[place][n][rank][0]]],
                    }
