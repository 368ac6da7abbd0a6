"""How many bytes of memory recordings and maps hold, tables of who sees whom among them."""

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
    """What it keeps of all its runs; what several calls share is counted once."""
    return of_strands([strand for run in recording.runs for strand in run.strands.values()])


def of_strands(strands: Sequence[Strand]) -> int:
    """What some modules' calls keep."""
    pieces = [piece for strand in strands for piece in strand.pieces]
    found = [keys for strand in strands for keys in strand.keys]
    for piece in pieces:
        own = piece.q, piece.values, piece.bias, piece.sinks, piece.weight
        found += [x for x in own if x is not None] + tables(piece.mask)
    return held(found)


def of_map(m: AttentionMap) -> int:
    """What a map of one matrix keeps, whoever else keeps it too."""
    request = Look(m).plane(0, 0).request
    return m.nbytes + held(tables(request.mask))


def tables(mask: Mask) -> list[Tensor]:
    """The tensors that a rule is written in."""
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
    """The bytes behind some tensors, of which several may be parts of one."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
