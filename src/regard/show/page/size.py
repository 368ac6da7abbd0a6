"""Memory in bytes of recordings and maps, including the tables of masks."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from regard.map import AttentionMap
from regard.mechanism.masks import Documents, Given
from regard.mechanism.rule import Mask
from regard.observe import Recording
from regard.observe.look import Look
from regard.observe.rules import leaves
from regard.observe.strand import Strand


def of_recording(recording: Recording) -> int:
    """Compute the bytes of all runs of a recording; what several calls share is counted once."""
    return of_strands([strand for run in recording.runs for strand in run.strands.values()])


def of_strands(strands: Sequence[Strand]) -> int:
    """Compute the bytes of the calls of some modules."""
    pieces = [piece for strand in strands for piece in strand.pieces]
    found = [keys for strand in strands for keys in strand.keys]
    for piece in pieces:
        own = piece.q, piece.values, piece.bias, piece.sinks, piece.weight
        found += [x for x in own if x is not None] + tables(piece.mask)
    return held(found)


def of_map(m: AttentionMap) -> int:
    """Compute the bytes of a map of one matrix, including those that it shares."""
    request = Look(m).plane(0, 0).request
    return m.nbytes + held(tables(request.mask))


def tables(mask: Mask) -> list[Tensor]:
    """List the tensors of a mask."""
    found: list[Tensor] = []

    def look(one: Mask) -> Mask:
        if isinstance(one, Given):
            found.append(one.given)
        elif isinstance(one, Documents):
            found.extend((one.queries, one.keys))
        return one

    leaves(mask, look)
    return found


def held(tensors: Iterable[Tensor]) -> int:
    """Compute the bytes of the storages of some tensors, each storage once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
