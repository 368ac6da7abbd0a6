"""What the page keeps in memory beside the recording it was given, with every cache driven to its bound."""

import json
import types
from collections.abc import Iterator

import pytest
import torch

from regard.show.page import executor, memory_size, recording_entry, recording_store, timeouts
from regard.show.page.session import Session
from show.page.server_client import in_steps, make_writer, open_client, rows_and_keys

MB = 2**20
TEXTS = ["ABC" * 20, "CAB" * 20, "BBC" * 20]
LEFT_OUT = (types.ModuleType, types.FunctionType, types.MethodType, type, torch.nn.Module)


def tensors(of: object) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from something, but not through a model."""
    seen, waiting = set(), [of]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, LEFT_OUT):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        else:
            waiting += vars(one).values() if hasattr(one, "__dict__") else ()


def count_own_bytes(found: Session, given) -> int:
    """The bytes of what a session holds, without the recording it was given."""
    own = {x.untyped_storage().data_ptr() for x in tensors(given)}
    return memory_size.count_storage_bytes([x for x in tensors(found) if x.untyped_storage().data_ptr() not in own])


def used(client, rounds: int = 2) -> int:
    """Asks everything of every head of every recording, types and writes: the most that was held at any time."""
    found, most = client.server.page.session, 0
    given = found.get_entry(found.listed[0]).recording
    for n in range(rounds):
        for text in TEXTS if found.adapter else ():
            client.post("/api/type", {"text": text})
            client.post("/api/generate", {"text": text[:9], "tokens": 30, "temperature": 1, "seed": n})
        for one in client.json("/api/start")["recordings"]:
            (attention,) = one["attentions"]
            for layer, shape in enumerate(attention["layers"]):
                for head in range(shape["heads"]):
                    place = {"layer": layer, "head": head, "b": n % one["batch"]}
                    client.lines(f"/api/r/{one['id']}/open", **place)
                    client.codes(f"/api/r/{one['id']}/tile", **place, level=0, row=0, column=0)
                    client.json(f"/api/r/{one['id']}/cell", **place, q=2, k=1)
                    client.codes(f"/api/r/{one['id']}/column", **place, k=1, heads="0,1")
                    client.json(f"/api/r/{one['id']}/steps", **place, q=3)
                    most = max(most, count_own_bytes(found, given))
                client.codes(f"/api/r/{one['id']}/thumbs", layer=layer)
                most = max(most, count_own_bytes(found, given))
    return most


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 2**23], ids=["each head alone", "all heads of a layer"])
@pytest.mark.parametrize("recording", ["many calls", "one call"])
def test_it_stays_within_its_bounds_whatever_is_asked(recording, limit, monkeypatch):
    given = in_steps(layers=3, tokens=43, width=64) if recording == "many calls" else rows_and_keys(*one_call())
    layer = memory_size.measure_recording(given) // len(given.layers())
    monkeypatch.setattr(recording_entry, "MAX_JOINED_LAYER_BYTES", limit)
    monkeypatch.setattr(recording_entry, "MAX_MAPS_BYTES", layer)
    monkeypatch.setattr(recording_store, "MAX_OPENED_BYTES", 2 * layer)
    monkeypatch.setattr(recording_store, "MAX_TYPED_BYTES", 60_000)
    monkeypatch.setattr(recording_store, "MAX_TYPED", 5)
    with open_client(given, adapter=make_writer()) as client:
        kept = client.server.page.session
        held = used(client)
        typed = 60_000 + 5 * 2 * 30_000  # their recordings, and the joined maps of those that were written
        assert held <= 2 * layer + layer + typed
        assert len(kept._entries) <= 6
        assert len(kept._opened) > 1


def one_call():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 6, 97, 64, generator=generator), torch.randn(1, 2, 97, 64, generator=generator)


@pytest.mark.slow
def test_many_short_texts_leave_few_recordings(monkeypatch):
    monkeypatch.setattr(recording_store, "MAX_TYPED", 3)
    with open_client(rows_and_keys(*one_call()), adapter=make_writer()) as client:
        typed = [json.loads(client.post("/api/type", {"text": "A" * n})[1])["id"] for n in range(1, 10)]
        assert [one["id"] for one in client.json("/api/start")["recordings"]] == client.ids
        found = client.json("/api/recordings", ids=",".join([*client.ids, *typed]))["recordings"]
        assert [one["id"] for one in found] == [*client.ids, *typed[-3:]]


def test_the_bounds_together_are_below_300_mb():
    typed = recording_store.MAX_TYPED_BYTES
    caches = recording_store.MAX_OPENED_BYTES + typed + recording_entry.MAX_MAPS_BYTES + typed  # the maps of those written
    waiting = timeouts.MAX_CONNECTIONS * 2 * 2**16 + executor.MAX_REQUESTS * 256 * 256 * 2 + timeouts.MAX_CONNECTIONS * 2**14
    assert caches + waiting < 250 * MB
