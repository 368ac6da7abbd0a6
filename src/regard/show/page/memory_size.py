"""Memory in bytes of recordings and maps, including the tables of masks."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from regard.map import AttentionMap
from regard.observe import Recording
from regard.observe.map_view import MapView
from regard.observe.stored_calls.kv_history import KVHistory


def measure_recording(recording: Recording) -> int:
    """Compute the bytes of all runs of a recording; what several calls share is counted once."""
    implicit = [x for run in recording.runs for history in run.implicit_histories.values() for x in history.tensors]
    return measure_histories([history for run in recording.runs for history in run.histories.values()]) + (
        count_storage_bytes(implicit)
    )


def measure_histories(histories: Sequence[KVHistory]) -> int:
    """Compute the bytes of the calls of some modules."""
    stored_calls = [stored for history in histories for stored in history.stored_calls]
    found = [keys for history in histories for keys in history.keys]
    for stored in stored_calls:
        own = stored.q, stored.v, stored.bias, stored.sinks, stored.weight
        found += [x for x in own if x is not None] + list(stored.mask.tensors)
    return count_storage_bytes(found)


def measure_map(m: AttentionMap) -> int:
    """Compute the bytes of a map of one matrix, including those that it shares."""
    request = MapView(m).get_plane(0, 0).request
    return m.nbytes + count_storage_bytes(request.mask.tensors)


def count_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Compute the bytes of the storages of some tensors, each storage once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
