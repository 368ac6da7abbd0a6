import torch

from regard import Causal, Documents, Given
from regard.show.page import memory_size
from show.page.server_client import in_steps, rows_and_keys

B, H, Q, D = 2, 3, 5, 7


def test_a_recording_holds_queries_keys_biases_and_tables():
    q, k = torch.randn(B, H, Q, D), torch.randn(B, H, Q, D)
    plain = memory_size.measure_recording(rows_and_keys(q, k))
    assert plain == q.nbytes + k.nbytes
    bias, table = torch.randn(1, H, Q, Q), torch.rand(B, H, Q, Q) < 0.5
    assert memory_size.measure_recording(rows_and_keys(q, k, bias=bias)) == plain + bias.nbytes
    assert memory_size.measure_recording(rows_and_keys(q, k, Causal() & ~Given(table))) == plain + table.nbytes
    ids = Documents([1, 1, 2, 2, 2])
    assert memory_size.measure_recording(rows_and_keys(q, k, ids)) == plain + ids.keys.nbytes


def test_a_recording_of_many_calls_holds_the_pieces_of_all():
    recording = in_steps()
    calls = [call.stored for call in recording.calls]
    keys = [x for strand in recording.last.histories.values() for x in strand.keys]
    assert memory_size.measure_recording(recording) == sum(one.q.nbytes + one.v.nbytes for one in calls) + sum(
        x.nbytes for x in keys
    )


def test_a_map_holds_its_tables_too():
    q, table = torch.randn(1, 1, Q, D), torch.rand(1, 1, Q, Q) < 0.5
    recording = rows_and_keys(q, q, Given(table))
    assert memory_size.measure_map(recording.map(0)) == 2 * q.nbytes + table.nbytes


def test_what_several_share_is_counted_once():
    x = torch.randn(100)
    assert memory_size.count_storage_bytes([x, x[3:], x.view(10, 10)]) == x.nbytes
