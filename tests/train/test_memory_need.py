import pytest

from regard import ConfigError
from regard.train import begin, memory_need
from regard.train.memory_need import count_needed_bytes
from regard.train.translator_sizes import TranslatorSizes
from train import small_runs

GIANTS = {
    "batch": {"batch": 10**9},
    "accumulate": {"accumulate": 10**10},
    "context": {"context": 10**9},
    "width": {"width": 10**6},
    "layers": {"layers": 10**8},
}


@pytest.mark.parametrize("name", GIANTS)
def test_what_no_machine_holds_is_refused_with_its_bytes_before_anything_is_written(tmp_path, monkeypatch, name):
    monkeypatch.setattr(memory_need, "read_memory_size", lambda: 2**36)
    small_runs.corpus(tmp_path)
    config = small_runs.config(tmp_path, **GIANTS[name])
    needed = sum(count_needed_bytes(config, 1, 1).values())
    with pytest.raises(ConfigError, match=f"at least {needed:,} bytes of memory.*and there are 68,719,476,736") as raised:
        begin(config)
    assert len(str(raised.value)) <= 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]


def test_a_translator_that_no_machine_holds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_need, "read_memory_size", lambda: 2**36)
    small_runs.pairs(tmp_path)
    with pytest.raises(ConfigError, match="bytes of memory"):
        begin(small_runs.translation(tmp_path, "transformer", model={"width": 2**16, "layers": 9}))
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_makes_a_model_too_large_is_refused_when_it_is_known(tmp_path, monkeypatch):
    small_runs.corpus(tmp_path)
    config = small_runs.config(tmp_path)
    between = [sum(count_needed_bytes(config, 1, size).values()) for size in (1, 9)]
    monkeypatch.setattr(memory_need, "read_memory_size", lambda: sum(between) // 2)
    with pytest.raises(ConfigError, match="bytes of memory"):
        begin(config)


@pytest.mark.parametrize(("name", "value"), [("layers", 10**9), ("width", 10**9), ("hidden", 2**70), ("vocabulary", 2**40)])
def test_sizes_that_no_translator_has_are_refused_before_it_is_made(name, value):
    with pytest.raises(ConfigError, match=f"model.{name} must be .* at most"):
        TranslatorSizes("recurrent", {name: value})
