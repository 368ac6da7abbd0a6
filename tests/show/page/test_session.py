import json

import pytest
import torch

from regard import ConfigError
from regard.show.page import session as sessions
from regard.show.page import size
from regard.show.page.entry import Place
from show.page.asking import TEXT, asking, of_two_parts, sorter


def test_old_recordings_of_what_was_typed_make_room_and_the_given_one_stays(recording, monkeypatch):
    monkeypatch.setattr(sessions, "TYPED_BYTES", size.of_recording(recording))
    with asking(recording, speaker=sorter(torch.float64)) as client:
        first, second = (json.loads(client.post("/api/type", {"text": text})[1])["id"] for text in (TEXT, TEXT))
        assert [one["id"] for one in client.json("/api/start")["recordings"]] == ["r1", second]
        status, sentence = client.refused(f"/api/r/{first}/words")
        assert (status, "make room" in sentence) == (404, True)
        assert client.json("/api/r/r1/words")


def test_few_heads_are_kept_open(recording, monkeypatch):
    monkeypatch.setattr(sessions, "OPENED_BYTES", 3000)
    with asking(recording) as client:
        for head in range(9):
            assert client.lines("/api/r/r1/open", layer=head // 3, head=head % 3)[-1]["levels"] == 1
        assert 1 <= len(client.server.page.session.heads()) < 9


def test_a_head_of_a_recording_that_is_gone_is_not_kept(recording):
    session = sessions.Session(speaker=sorter())
    entry = session.add(recording)
    session.forget(entry.id)
    with pytest.raises(ConfigError, match="make room"):
        session.opened(entry, Place())
    assert not session.heads()


def test_a_head_is_opened_once_whether_its_part_is_named_or_not():
    session = sessions.Session(of_two_parts())
    entry = session.entry("r1")
    assert [one.part for one in entry.attentions] == ["encoder", "decoder"]
    assert session.opened(entry, Place(part="encoder")) is session.opened(entry, Place())
    assert session.opened(entry, Place(part="decoder")) is not session.opened(entry, Place())
