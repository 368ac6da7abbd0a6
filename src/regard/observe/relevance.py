"""Relevance: what each token counts for some queries through all layers, from the pull of every weight (Chefer et al. 2021).

A layer acts by M, the mean over its heads of the positive part of the pull, (q, k). M is never stored: rows and columns are
multiplied with it block by block.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map.signed_map import SignedMap
from regard.observe.recorded_runs.run import IMPLICIT, Run
from regard.observe.recorded_runs.token_mixers import list_token_mixers

FindPull = Callable[[int | str, str, str | None], SignedMap]  # of layer, attention and part


def compute_self_relevance(run: Run, find_pull: FindPull, queries: Tensor, part: str | None) -> Tensor:
    """Return the rows (b, n, t) of R = (I + M_L) ... (I + M_1) of the queries (n,).

    Layers with and without a softmax are multiplied in the order they ran. Raises ConfigError if there is no self-attention, or
    if that order is not known, ShapeError if queries and keys of a layer differ in number.
    """
    layers = list_token_mixers(run, None, part)
    if not layers:
        raise ConfigError("relevance needs self-attention, and none was recorded.")
    rows = make_one_hot_rows(find_pull(layers[-1][1], layers[-1][0], part), queries)
    for kind, layer in reversed(layers):
        pull = check_square(find_pull(layer, kind, part), run.layers(kind, part)[layer], rows.shape[2])
        rows = rows + multiply_rows(rows, pull)
    return rows


def compute_cross_relevance(run: Run, find_pull: FindPull, queries: Tensor, part: str | None) -> Tensor:
    """Return the rows (b, n, s) of the relevance of the source tokens of an encoder-decoder model for the queries (n,).

    R_ts starts at 0; a self-attention of the decoder turns it into (I + M) R_ts, a cross-attention adds N(R_tt)ᵀ M N(R_ss),
    where R_tt and R_ss are the relevance of the decoder's and the encoder's self-attention up to there, and N(R) - I is R - I
    with its rows divided by their sums. A row that is 0 stays 0.
    """
    if run.list_all_visits(IMPLICIT):
        raise ConfigError(
            "relevance of the sources is of layers with a softmax, and this model has others, whose part would be missing."
        )
    steps = run.list_ordered_layers(("self", "cross"), part)
    crossing = [layer for kind, layer in steps if kind == "cross"]
    if not crossing:
        raise ConfigError("relevance of the sources needs cross-attention, and none was recorded.")
    last = find_pull(crossing[-1], "cross", part)
    rows = make_one_hot_rows(last, queries)
    found = rows.new_zeros(*rows.shape[:2], last.shape[3])
    for place, (kind, layer) in reversed(list(enumerate(steps))):
        pull = find_pull(layer, kind, part)
        if kind == "self":
            rows = rows + multiply_rows(rows, check_square(pull, f"decoder layer {layer}", rows.shape[2]))
            continue
        earlier = [find_pull(number, "self", part) for one, number in steps[:place] if one == "self"]
        found += multiply_rows(multiply_normalized(earlier, rows.mT).mT, pull)
    return apply_encoder(found, [find_pull(name, "self", None) for name in list_encoder_layers(run, part)])


def apply_encoder(rows: Tensor, pulls: Sequence[SignedMap]) -> Tensor:
    """Return rows N(R_ss), (b, n, s), of the encoder's self-attentions from the first to the last."""
    if not pulls:
        return rows
    ones = torch.ones_like(rows.mT[..., :1])
    shares = divide_rows(rows.mT, multiply_all(pulls, ones) - ones).mT
    spread = shares
    for pull in reversed(pulls):
        spread = spread + multiply_rows(spread, check_square(pull, "the encoder", rows.shape[2]))
    return rows + spread - shares


def list_encoder_layers(run: Run, part: str | None) -> list[str]:
    """Return the self-attentions that are not of the decoder, in order. Raises ConfigError if no part is the decoder."""
    every, decoder = run.list_all_visits("self"), run.list_visits("self", part)
    if part is None and every and every == decoder and run.parts:
        raise ConfigError(f"relevance of the sources needs the name of the decoder: part= one of {', '.join(run.parts)}.")
    return [name for name, visit in every if (name, visit) not in decoder]


def make_one_hot_rows(m: SignedMap, queries: Tensor) -> Tensor:
    """Return rows (b, n, q) of float64 that are 1 at the queries (n,) and 0 elsewhere."""
    b, q, device = m.shape[0], m.shape[2], m.device
    return torch.eye(q, dtype=torch.float64, device=device)[queries.to(device)].expand(b, -1, -1)


def check_square(m: SignedMap, name: str, t: int) -> SignedMap:
    """Return the map of a layer of self-attention. Raises ShapeError unless it has t queries and t keys."""
    if m.shape[2:] != (t, t):
        raise ShapeError(f"relevance needs {t} queries and as many keys in each layer; {name} has (q, k) = {m.shape[2:]}.")
    return m


def multiply_rows(rows: Tensor, pull: SignedMap) -> Tensor:
    """Return rows M, (b, n, k), of rows (b, n, q)."""
    found = rows.new_zeros(*rows.shape[:2], pull.shape[3])
    for b, _, run, entries in pull.iterate_blocks():
        share = rows[b, :, run.start : run.stop] @ entries.clamp(min=0).double()
        found[b].index_add_(1, run.columns, share / pull.shape[1])
    return found


def multiply_columns(pull: SignedMap, columns: Tensor) -> Tensor:
    """Return M columns, (b, q, n), of columns (b, k, n)."""
    found = columns.new_zeros(columns.shape[0], pull.shape[2], columns.shape[2])
    for b, _, run, entries in pull.iterate_blocks():
        found[b, run.start : run.stop] += entries.clamp(min=0).double() @ columns[b, run.columns] / pull.shape[1]
    return found


def multiply_all(pulls: Sequence[SignedMap], columns: Tensor) -> Tensor:
    """Return (I + M_l) ... (I + M_1) columns, (b, t, n)."""
    for pull in pulls:
        columns = columns + multiply_columns(pull, columns)
    return columns


def multiply_normalized(pulls: Sequence[SignedMap], columns: Tensor) -> Tensor:
    """Return N(R) columns, (b, t, n), of R = (I + M_l) ... (I + M_1): the sums of its rows are found in the same traversal."""
    both = torch.cat([columns, torch.ones_like(columns[..., :1])], -1)
    added = multiply_all(pulls, both) - both
    return columns + divide_rows(added[..., :-1], added[..., -1:])


def divide_rows(columns: Tensor, sums: Tensor) -> Tensor:
    """Return the columns with row i divided by its sum, 0 where that is 0."""
    return torch.where(sums == 0, 0, columns / sums.where(sums != 0, 1))
