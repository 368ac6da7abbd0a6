"""An atlas has the same bytes whoever computes its shards, in whatever order, and however often they are killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from head_atlas.small_atlas import SETTINGS, make_model, make_texts, read_results
from regard import GPT2, GPT2Config
from regard.errors import ConfigError, DataError
from regard.head_atlas.atlas import read_atlas
from regard.head_atlas.build_atlas import merge_atlas
from regard.head_atlas.plan import get_shard_path
from regard.text import Letters

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'regard[atlas]'")
SCRIPT = Path(__file__).with_name("small_atlas.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SCRIPT.parents[1], Path(regard.__file__).parents[1])))}


@pytest.fixture(scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory, one_thread):
    """A folder with the texts, the model, and the atlas that one call made."""
    folder = tmp_path_factory.mktemp("atlas")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts()))
    make_model().save(folder / "model")
    build(folder, "whole")
    return folder


def build(place: Path, name: str, **settings):
    return regard.atlas(regard.GPT2.load(place / "model"), place / "texts.jsonl", place / name, **{**SETTINGS, **settings})


def start_process(place: Path, name: str, **settings) -> subprocess.Popen:
    command = [
        sys.executable,
        "-W",
        "error",
        SCRIPT,
        place / name,
        json.dumps(settings),
        place / "model",
        place / "texts.jsonl",
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


@pytest.mark.slow
def test_an_atlas_of_all_queries_has_the_scores_the_chances_and_the_kinds_of_heads(tmp_path, one_thread):
    torch.manual_seed(0)
    letters = Letters.from_texts(["ABC"])  # so few that a head which attends to all meets its own letter often
    model = GPT2(GPT2Config(layers=2, heads=3, width=12, context=64, vocabulary=letters.vocabulary)).eval()
    model.text = letters
    texts = ["".join("ABC"[n] for n in torch.randint(3, (41,)).tolist()) for _ in range(7)]
    table = regard.atlas(model, texts, tmp_path / "atlas", queries=1000)
    ids = torch.tensor([letters.encode(text) for text in texts])
    with torch.inference_mode(), regard.record(model) as recording:
        model(ids)
    recording.tokens = [list(text) for text in texts]
    for row, expected in zip(table, regard.heads(recording), strict=True):
        assert row.kind == expected.kind
        for name, score in row.scores.items():
            if name != "positional":  # whose distances are in bins
                numbers, wanted = ([x, x.low, x.high, x.count, x.chance] for x in (score, expected.scores[name]))
                assert numbers == pytest.approx(wanted, rel=1e-5, abs=1e-5, nan_ok=True), name


@pytest.mark.slow
def test_the_table_has_a_row_for_every_head_and_says_of_what_it_is(place):
    table = merge_atlas(place / "whole")
    assert [(row.layer, row.head) for row in table] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert table.notes == (
        "18 documents of at most 48 tokens, of each 16 queries or fewer. Intervals: 95 %, over the documents.",
    )
    assert all(row.scores["entropy"].count == 16 * 18 for row in table)


@pytest.mark.slow
def test_shards_in_any_order_give_the_same_bytes(place):
    for number in (2, 0, 3, 1):
        table = build(place, "shards", shard=(number, 4))
        assert (table is None) == (number != 1)
    assert read_results(place / "shards") == read_results(place / "whole")


@pytest.mark.slow
def test_shards_of_another_machine_are_merged_without_the_model(place):
    build(place, "merged", shard=(0, 2))
    assert build(place, "other", shard=(1, 2)) is None
    for path in (place / "other" / "shards").iterdir():
        path.rename(place / "merged" / "shards" / path.name)
    merge_atlas(place / "merged")
    assert read_results(place / "merged") == read_results(place / "whole")


@pytest.mark.slow
def test_an_atlas_that_is_not_finished_is_that_of_the_shards_that_are(place):
    for number in (2, 1):
        assert build(place, "unfinished", shard=(number, 4)) is None
    found = read_atlas(place / "unfinished", unfinished=True)
    assert found.heads.notes[0].startswith("8 of 18 documents of at most 48 tokens")
    assert all(row.scores["entropy"].count == 16 * 8 for row in found.heads)
    with pytest.raises(DataError, match="shard 0 of 9 is missing"):
        read_atlas(place / "unfinished")
    assert read_atlas(place / "whole", unfinished=True).heads == read_atlas(place / "whole").heads


@pytest.mark.slow
def test_two_processes_at_once_give_the_same_bytes(place):
    running = [start_process(place, "processes", shard=[number, 2]) for number in range(2)]
    errors = [process.communicate()[1] for process in running]
    assert errors == ["", ""]
    merge_atlas(place / "processes")
    assert read_results(place / "processes") == read_results(place / "whole")


@pytest.mark.slow
def test_twenty_kills_at_any_moment_change_no_byte(place):
    script = Path(__file__).with_name("kill_atlases.py")
    command = [sys.executable, "-W", "error", script, place / "killed", place / "model", place / "texts.jsonl", "20"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "20\n", "")
    assert read_results(place / "killed") == read_results(place / "whole")


@pytest.mark.slow
def test_ray_gives_the_same_bytes_also_if_its_workers_are_killed(place):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'regard[ray]'")
    script = Path(__file__).with_name("kill_workers.py")
    command = [sys.executable, script, place / "ray", place / "model", place / "texts.jsonl"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=300)
    if ran.returncode == 3:
        pytest.skip(ran.stdout.strip())
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) == 2
    assert read_results(place / "ray") == read_results(place / "whole")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"tokens": 40}, "tokens"),
        ({"documents": 3}, "documents"),
        ({"queries": 4}, "queries"),
        ({"shard_size": 1}, "shard_size"),
    ],
)
def test_other_settings_than_those_of_the_folder_are_refused(place, settings, name):
    with pytest.raises(ConfigError, match=f"is an atlas with {name} .* not {next(iter(settings.values()))}"):
        build(place, "whole", **settings)


@pytest.mark.slow
def test_other_texts_are_refused(place, tmp_path):
    with pytest.raises(ConfigError, match="is an atlas with corpus"):
        regard.atlas(regard.GPT2.load(place / "model"), make_texts(), place / "whole", **SETTINGS)
    (place / "texts.jsonl").rename(place / "first.jsonl")
    (place / "texts.jsonl").write_text((place / "first.jsonl").read_text().replace("cat", "act"))
    with pytest.raises(ConfigError, match="is an atlas with texts whose checksum is"):
        build(place, "whole")
    (place / "first.jsonl").rename(place / "texts.jsonl")
    regard.atlas(make_model(), make_texts(), tmp_path, **SETTINGS)
    with pytest.raises(ConfigError, match="is an atlas of other documents"):
        regard.atlas(make_model(), make_texts()[1:], tmp_path, **SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("byte", [3, 20, 300, 2000, -5])
def test_a_shard_that_was_altered_is_refused(place, tmp_path, byte):
    build(place, f"altered {byte}")
    path = get_shard_path(place / f"altered {byte}", 1)
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"shard 1 .*Remove .* and run the same command again"):
        merge_atlas(place / f"altered {byte}")
    path.unlink()
    build(place, f"altered {byte}")
    assert read_results(place / f"altered {byte}") == read_results(place / "whole")


@pytest.mark.parametrize("name", ["new", "several/new", "there"])
def test_texts_without_a_document_leave_nothing_behind(place, tmp_path, name):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="no document of 32 tokens or more"):
        regard.atlas(regard.GPT2.load(place / "model"), ["the cat sat"], tmp_path / name, **SETTINGS)
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["notes.txt", "there"]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", 200_000 * b"[", b"\xff", b'{"model": 1}'])
def test_a_plan_that_is_none_is_refused(tmp_path, data):
    (tmp_path / "atlas.json").write_bytes(data)
    with pytest.raises(DataError, match=r"atlas\.json cannot be read"):
        merge_atlas(tmp_path)


@pytest.mark.slow
def test_all_queries_of_whole_texts_give_the_scores_of_heads(place):
    """Where no query is left out, the mean over documents is that of regard.heads on the same documents."""
    model = regard.GPT2.load(place / "model")
    table = regard.atlas(model, [text[:47] for text in make_texts()], place / "all", **{**SETTINGS, "queries": 48})
    begin = model.get_end_settings().get("end")
    ids = torch.tensor([([] if begin is None else [begin]) + model.text.encode(text[:47]) for text in make_texts()])
    with torch.no_grad(), regard.record(model) as recording:
        model(ids)
    expected = regard.heads(recording, tokens=ids, classes={})
    for row, other in zip(table, expected, strict=True):
        for name in (
            "previous token",
            "itself",
            "duplicate",
            "induction",
            "first token",
            "sink",
            "local",
            "distance",
            "entropy",
        ):
            score = other.scores[name]
            # float32 weights, of one batch or of single documents: the rounding of 48 sums, times 48 tokens of distance
            assert [*map(float, (row.scores[name], row.scores[name].low, row.scores[name].high))] == pytest.approx(
                [*map(float, (score, score.low, score.high))], abs=48 * 48 * torch.finfo(torch.float32).eps
            ), name
