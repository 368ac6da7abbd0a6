import torch

from regard import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.recording_id import identify_recording
from regard.show.page.session import Session
from show.page.server_client import make_sorter, open_client, record_encoder_and_decoder, record_sorter, rows_and_keys


def test_the_same_recording_has_the_same_id_and_every_other_has_another():
    q, k = (torch.randn(1, 2, 7, 5, generator=torch.Generator().manual_seed(n)) for n in range(2))
    different = [
        record_sorter(),
        record_sorter("CBABBCABBBA"),
        record_encoder_and_decoder(),
        rows_and_keys(q, k),
        rows_and_keys(k, q),
    ]
    ids = [identify_recording(one) for one in different]
    assert len(set(ids)) == len(ids)
    assert [identify_recording(one) for one in (record_sorter(), rows_and_keys(q, k))] == [ids[0], ids[3]]
    assert ids[0].startswith("sorter-cbabbcabbbc-")


def test_a_text_has_one_id_on_every_server_of_a_model_and_is_read_once():
    first, second = (Session(None, make_sorter()) for _ in range(2))
    found = [one.run_text("CBA", lambda: None)["id"] for one in (first, second, first)]
    assert len(set(found)) == 1
    entry = first.get_entry(found[0])
    first.run_text("CBA", lambda: None)
    assert first.get_entry(found[0]) is entry
    assert first.run_text("CBB", lambda: None)["id"] != found[0]


def test_another_model_of_the_same_name_gives_another_id():
    model = GPT2.load("sorter")
    with torch.no_grad():
        model.tokens.weight.add_(1)
    ids = [Session(None, one).run_text("CBA", lambda: None)["id"] for one in (make_sorter(), GPT2Adapter("sorter", model))]
    assert ids[0] != ids[1]


def test_what_was_typed_is_listed_for_nobody_else_and_found_by_its_id(recording):
    with open_client(recording, adapter=make_sorter()) as client:
        found = client.session.run_text("CBA", lambda: None, is_listed=False)["id"]
        assert [one["id"] for one in client.json("/api/start")["recordings"]] == client.ids == [identify_recording(recording)]
        assert [one["id"] for one in client.json("/api/recordings", ids=f"{found},nothing")["recordings"]] == [found]
        assert client.expect_refusal("/api/recordings", ids="")[0] == 400
        assert client.expect_refusal("/api/recordings", ids=",".join(["a"] * 33))[0] == 400
