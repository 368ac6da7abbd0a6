import json

import torch

from regard.show.page import memory_size, recording_store
from show.page.server_client import TEXT, make_sorter, open_client


def test_old_recordings_of_what_was_typed_make_room_and_the_given_one_stays(recording, monkeypatch):
    monkeypatch.setattr(recording_store, "MAX_TYPED_BYTES", memory_size.measure_recording(recording))
    with open_client(recording, adapter=make_sorter(torch.float64)) as client:
        first, second = (json.loads(client.post("/api/type", {"text": text})[1])["id"] for text in (TEXT, TEXT[1:]))
        assert [one["id"] for one in client.json("/api/start")["recordings"]] == client.ids
        assert [one["id"] for one in client.json("/api/recordings", ids=f"{first},{second}")["recordings"]] == [second]
        status, sentence = client.expect_refusal(f"/api/r/{first}/words")
        assert (status, "make room" in sentence) == (404, True)
        assert client.json("/api/r/r1/words")
