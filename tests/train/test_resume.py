import json
import random
import shutil

import pytest

from regard import DataError, RegardError
from regard.train import begin, checkpoint_header, run
from regard.train.checkpoint_header import list_checkpoint_folders
from regard.train.listeners.json_lines import ReportLog
from train import small_runs
from train.small_runs import read_bits

STEPS, FUZZED = 6, 5  # of a run, of which the last checkpoint is loaded; alterations of each file


def config(folder, out, **settings):
    return small_runs.config(
        folder, **{"out": str(out), "dropout": 0.3, "steps": STEPS, "checkpoint_every": 1, "keep": 2, **settings}
    )


def models(out) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("*/*.safetensors"))}


@pytest.fixture(scope="module")
def partial_run(tmp_path_factory):
    """A run that was left after four of its six steps, and what it would have come to."""
    folder = tmp_path_factory.mktemp("left")
    (folder / "story.txt").write_text(small_runs.TEXT)
    settings = {"corpus": "", "text": str(folder / "story.txt")}
    listeners = [
        ReportLog(folder / "run" / "log.jsonl"),
        lambda training, report: report.step == 4 and training.stop("the test"),
    ]
    run(config(folder, folder / "run", **settings), listeners)
    whole = run(config(folder, folder / "whole", **settings))
    return folder, settings, read_bits(whole), models(folder / "whole")


def reseal(out, **changes) -> None:
    """Alters what the last run.json says, and its checksum too."""
    path = list_checkpoint_folders(out / "checkpoints")[-1] / "run.json"
    path.write_text(json.dumps(checkpoint_header.add_checksum({**json.loads(path.read_text()), **changes})))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"running": {"mean": 1.0}}, "running must be the numbers"),
        ({"running": {"mean": 1.0, "variance": -1.0, "count": 3, "skipped": 0}}, "running must be numbers of at least 0"),
        ({"running": {"mean": 1.0, "variance": 1.0, "count": True, "skipped": 0}}, "running must be"),
        ({"running": {"mean": float("nan"), "variance": 1.0, "count": 3, "skipped": 0}}, "running must be the numbers"),
        ({"running": [1, 2, 3, 4]}, "running must be the numbers"),
        ({"best": "2"}, "best must be a number"),
        ({"best": float("inf")}, "best must be a number"),
        ({"config": []}, "config must be an object"),
        ({"config": {"steps": -5}}, "its config is invalid: steps must be a whole number"),
        ({"config": {"step": 5}}, "its config is invalid: step is not a training setting"),
        ({"config": {"model": 5}}, "its config is invalid"),
        ({"corpus": None}, "corpus must be an object"),
        ({"computed_by": {"torch": 2}}, "computed_by must be an object of strings"),
    ],
)
def test_what_a_run_cannot_go_on_from_is_refused_though_its_checksum_is_right(partial_run, tmp_path, changes, says):
    folder, settings, _, _ = partial_run
    shutil.copytree(folder / "run", tmp_path / "run")
    reseal(tmp_path / "run", **changes)
    with pytest.raises(DataError, match=says) as raised:
        begin(config(folder, tmp_path / "run", **settings))
    assert len(str(raised.value)) <= 500


@pytest.mark.slow
def test_the_best_model_is_written_again_where_it_was_altered_or_removed(partial_run, tmp_path):
    folder, settings, _, _ = partial_run
    shutil.copytree(folder / "run", tmp_path / "run")
    path = tmp_path / "run" / "model" / "model.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:-4] + b"\0\0\0\0")
    begin(config(folder, tmp_path / "run", **settings))
    assert path.read_bytes() == before
    shutil.rmtree(path.parent)
    begin(config(folder, tmp_path / "run", **settings))
    assert path.read_bytes() == before


def alterations(path, dice: random.Random):
    """What may befall a file: bits that flip, an end that is missing, other digits, other files' bytes, nothing left."""
    held = path.read_bytes()
    place = dice.randrange(max(len(held), 1))
    flipped = bytearray(held)
    if held:
        flipped[place] ^= 1 << dice.randrange(8)
    digits = [at for at, byte in enumerate(held) if byte in b"0123456789"]
    numbered = bytearray(held)
    if digits:
        numbered[dice.choice(digits)] = dice.choice(b"0123456789-e.")
    return [bytes(flipped), held[:place], bytes(numbered), held[:place] + dice.randbytes(9) + held[place:], None]


@pytest.mark.slow
def test_a_run_folder_with_any_file_altered_is_refused_or_comes_to_the_same_bits(partial_run, tmp_path):
    folder, settings, expected, written = partial_run
    dice, refused, same, told = random.Random(0), 0, 0, 0
    names = sorted(str(path.relative_to(folder / "run")) for path in (folder / "run").rglob("*") if path.is_file())
    assert {"log.jsonl", "corpus/corpus.json", "corpus/source.json", "model/model.safetensors", ".lock"} <= set(names)
    for name in names:
        for altered in alterations(folder / "run" / name, dice)[:FUZZED]:
            out = tmp_path / "run"
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(folder / "run", out)
            (out / name).unlink() if altered is None else (out / name).write_bytes(altered)
            try:
                training = run(config(folder, out, **settings), [ReportLog(out / "log.jsonl")])
            except RegardError as error:
                refused, told = refused + 1, max(told, len(str(error)))
            else:
                same += 1
                assert read_bits(training) == expected, name
                assert models(out) == written, name
    print(f"{refused + same} run folders: {refused} refused, {same} the same bits")
    assert refused > same / 4 > 0
    assert told <= 500
