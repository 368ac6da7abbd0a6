import pytest

import regard
from regard import ConfigError
from show.page.server_client import open_client
from show.vision_models import swin, vit

HEAD = {"kind": "self", "b": 0, "layer": 1, "head": 2}


@pytest.mark.slow
def test_heads_are_those_of_the_table(client, recording):
    *lines, last = client.lines("/api/r/r1/heads", kind="self")
    expected = regard.heads(recording)
    assert [line["done"] for line in lines] == list(range(1, 10))
    assert [line["row"]["kind"] for line in lines] == [row.kind for row in expected]
    assert last["detectors"] == list(expected.detectors)
    deciding = [row.scores.get({"broad": "breadth"}.get(row.kind, row.kind)) for row in expected]
    assert [line["row"]["verdict"] for line in lines] == [score and score.to_dict() for score in deciding]
    assert lines[5]["row"]["scores"] == pytest.approx(dict(expected[5].scores), rel=1e-10, nan_ok=True)
    assert client.lines("/api/r/r1/open", **HEAD)[-1]["kind"] == expected[5].kind


@pytest.mark.slow
def test_large_heads_are_typed_one_by_one_and_alike(recording, monkeypatch):
    monkeypatch.setattr("regard.show.page.head_table.MAX_LAYER_WEIGHTS", 10)
    with open_client(recording) as client:
        rows = [line["row"] for line in client.lines("/api/r/r1/heads")[:-1]]
    for found, row in zip(rows, regard.heads(recording), strict=True):
        assert found["scores"] == pytest.approx(dict(row.scores), rel=1e-10)
        assert (found["layer"], found["head"], found["kind"]) == (row.layer, row.head, row.kind)


def weight_on_second_key(m):
    """The weight on the second key."""
    return m[:, :, :, 1]


@pytest.mark.slow
def test_a_users_own_scores_are_in_the_table_with_their_docstrings(recording):
    expected = regard.heads(recording, scores=[weight_on_second_key])
    with open_client(recording, scores=[weight_on_second_key]) as client:
        *lines, last = client.lines("/api/r/r1/heads", kind="self")
    name = "weight on second key"
    assert name in last["detectors"]
    assert [line["row"]["scores"][name] for line in lines] == pytest.approx([row.scores[name] for row in expected], rel=1e-10)
    assert f"{name}: The weight on the second key." in last["notes"]


def test_a_score_without_a_docstring_is_refused_before_anything_is_written(recording, tmp_path):
    with pytest.raises(ConfigError, match="docstring"):
        regard.page(recording, tmp_path / "page.html", scores=[lambda m: m.dense()])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [vit, swin])
def test_the_notes_on_a_model_of_images_do_not_advise_to_set_the_text_of_its_tokens(make):
    recording, _ = make()
    expected = "the tokens are patches of an image, so there is no duplicate, induction, punctuation: these are scores of text."
    assert regard.heads(recording).notes == (expected,)
    with open_client(recording) as client:
        assert client.lines("/api/r/r1/heads", kind="self")[-1]["notes"] == [expected]
