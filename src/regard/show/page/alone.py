"""Selection of one head of a recording, without the others of its layer."""

from dataclasses import replace

from regard.mechanism.masks import Given
from regard.mechanism.rule import Mask
from regard.observe import Recording
from regard.observe.rules import leaves
from regard.observe.strand import Piece, Strand


def alone(recording: Recording, kind: str, part: str | None, layer: int, head: int) -> Recording:
    """Return a recording whose layer has only one of its heads, sharing memory; `head` counts the recorded heads.

    Joining many calls of a layer copies them; after this selection only one head is copied.
    """
    run = recording.last
    chosen = run.of(layer, kind, part)
    strands = {key: strand_of(strand, head) if strand in chosen else strand for key, strand in run.strands.items()}
    return replace(recording, runs=[replace(run, strands=strands)])


def strand_of(strand: Strand, head: int) -> Strand:
    """Select one head of the calls of a `Strand`."""
    share = strand.pieces[0].q.shape[1] // strand.keys[0].shape[1]
    own, group = slice(head, head + 1), slice(head // share, head // share + 1)
    pieces = [piece_of(piece, own, head) for piece in strand.pieces]
    return replace(strand, pieces=pieces, keys=[keys[:, group] for keys in strand.keys], chosen=(strand.heads[head],))


def piece_of(piece: Piece, own: slice, head: int) -> Piece:
    """Select one head of a call."""
    values = piece.values
    if values is not None:
        group = head * values.shape[1] // piece.q.shape[1]
        values = values[:, group : group + 1]
    bias = piece.bias
    return replace(
        piece,
        q=piece.q[:, own],
        values=values,
        mask=leaves(piece.mask, lambda mask: rule_of(mask, own)),
        bias=bias if bias is None or bias.shape[1] == 1 else bias[:, own],
        sinks=None if piece.sinks is None else piece.sinks[own],
    )


def rule_of(mask: Mask, own: slice) -> Mask:
    """Select one head of a mask, where it has a table for each."""
    return Given.sharing(mask.given[:, own]) if isinstance(mask, Given) and mask.given.shape[1] > 1 else mask
