import hashlib
from pathlib import Path

import pytest

from regard.evaluate import list_published
from regard.evaluate.published_figures import FILES

FOLDER = Path(__file__).parents[2] / "../shared/data/eval"


def test_the_figures_of_the_smallest_are_those_of_the_paper():
    found = {(one.text, one.measure): one.figure for one in list_published("gpt2")}
    assert found == {
        ("LAMBADA", "perplexity"): 35.13,
        ("LAMBADA", "accuracy, %"): 45.99,
        ("WikiText-2", "perplexity"): 29.41,
        ("PTB", "perplexity"): 65.85,
        ("WikiText-103", "perplexity"): 37.50,
    }


@pytest.mark.skipif(not FOLDER.exists(), reason="needs ../shared/data/eval, the published texts, which this machine lacks")
def test_the_published_texts_are_known_by_their_bytes():
    found = {path.name: FILES.get(hashlib.sha256(path.read_bytes()).hexdigest()) for path in FOLDER.iterdir()}
    assert found["lambada_test.jsonl"] == ("LAMBADA",)
    assert found["wiki.test.raw"] == ("WikiText-2", "WikiText-103")
    assert found["wiki.valid.raw"] is None
