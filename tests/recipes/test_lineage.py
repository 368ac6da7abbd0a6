import json
import sys

import pytest
from recipes.lineage.__main__ import main
from recipes.lineage.runs import HERE, MODELS, SEEDS, runs

from regard.train import TrainConfig
from text.pairs.small_pairs import make_pairs, write_pairs


def test_every_run_has_a_name_of_its_own_and_its_config_can_be_trained():
    names = [one.name for one in runs()]
    assert len({*names}) == len(names) == 3 * len(SEEDS) + 2 * 3
    for model in MODELS:
        config = TrainConfig.read(HERE / f"{model}.toml", corpus="somewhere")
        assert config.label_smoothing == 0.1


@pytest.mark.slow
def test_a_trial_trains_evaluates_and_writes_the_table_and_again_does_nothing(tmp_path, monkeypatch, capsys):
    for name, some in (("train", make_pairs(120)), ("val", make_pairs(140)[120:]), ("test", make_pairs(200)[140:])):
        write_pairs(tmp_path / "data" / "multi30k", name, some)
    asked = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--trial", "60", "--only", "multi30k-plain-0"]
    monkeypatch.setattr(sys, "argv", ["lineage", *asked])
    main()
    (row,) = json.loads((tmp_path / "out" / "table.json").read_text())
    assert (row["run"], row["model"], row["sentences"]) == ("multi30k-plain-0", "plain", 60)
    assert row["training_seconds"] > 0
    assert "bs:1000" in row["BLEU_4"]["signature"]
    assert sum(one["sentences"] for one in row["lengths_1"]) <= 60
    assert "| multi30k-plain-0 | " in (tmp_path / "out" / "table.md").read_text()
    log = (tmp_path / "out" / "multi30k-plain-0" / "log.jsonl").read_bytes()
    capsys.readouterr()
    main()
    assert "all 6 steps are done" in capsys.readouterr().out
    assert (tmp_path / "out" / "multi30k-plain-0" / "log.jsonl").read_bytes() == log
