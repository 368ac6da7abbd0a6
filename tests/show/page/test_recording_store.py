import json

import pytest
import torch

from regard import ConfigError
from regard.show.page import memory_size, recording_store
from regard.show.page.recording_entry import HeadPlace
from regard.show.page.session import Session
from show.page.server_client import TEXT, make_sorter, open_client, record_encoder_and_decoder


def test_old_recordings_of_what_was_typed_make_room_and_the_given_one_stays(recording, monkeypatch):
    monkeypatch.setattr(recording_store, "MAX_TYPED_BYTES", memory_size.measure_recording(recording))
    with open_client(recording, adapter=make_sorter(torch.float64)) as client:
        first, second = (json.loads(client.post("/api/type", {"text": text})[1])["id"] for text in (TEXT, TEXT[1:]))
        assert [one["id"] for one in client.json("/api/start")["recordings"]] == client.ids
        assert [one["id"] for one in client.json("/api/recordings", ids=f"{first},{second}")["recordings"]] == [second]
        status, sentence = client.expect_refusal(f"/api/r/{first}/words")
        assert (status, "make room" in sentence) == (404, True)
        assert client.json("/api/r/r1/words")


def test_few_heads_are_kept_open(recording, monkeypatch):
    monkeypatch.setattr(recording_store, "MAX_OPENED_BYTES", 3000)
    with open_client(recording) as client:
        for head in range(9):
            assert client.lines("/api/r/r1/open", layer=head // 3, head=head % 3)[-1]["levels"] == 1
        assert 1 <= len(client.server.page.session.list_opened()) < 9


def test_a_head_of_a_recording_that_is_gone_is_not_kept(recording):
    session = Session(adapter=make_sorter())
    entry = session.add_recording(recording)
    session.remove_recording(entry.id)
    with pytest.raises(ConfigError, match="make room"):
        session.open_head(entry, HeadPlace())
    assert not session.list_opened()


def test_a_head_is_opened_once_whether_its_part_is_named_or_not():
    session = Session(record_encoder_and_decoder())
    entry = session.get_entry(session.listed[0])
    assert [one.part for one in entry.attention_layers] == ["encoder", "decoder"]
    assert session.open_head(entry, HeadPlace(part="encoder")) is session.open_head(entry, HeadPlace())
    assert session.open_head(entry, HeadPlace(part="decoder")) is not session.open_head(entry, HeadPlace())
