import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import ConfigError
from regard.models import GPT2Config
from regard.train import TrainConfig
from regard.train.config import DEFAULT_MODEL, PAIR_SETTINGS, refuse_different_run
from regard.train.translator_sizes import TranslatorSizes

SIZES = GPT2Config(**DEFAULT_MODEL)


@given(
    steps=st.integers(1, 10**6),
    rate=st.floats(1e-9, 1.0),
    prompt=st.text(st.characters(exclude_categories=["Cs"])),
    masked=st.booleans(),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    heads=st.sampled_from([1, 2, 3]),
)
def test_a_config_is_the_same_after_it_was_written_and_read(steps, rate, prompt, masked, betas, heads):
    if "\x7f" in prompt:
        return  # JSON writes it as it is, and TOML refuses it
    config = TrainConfig(
        steps=steps,
        learning_rate=rate,
        prompt=prompt,
        mask_documents=masked,
        betas=betas,
        model=GPT2Config(layers=2, heads=heads, width=6 * heads),
    )
    assert TrainConfig.from_table(tomllib.loads(str(config))) == config
    assert TrainConfig.from_table(config.to_table()) == config


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"step": 3}, "step is not a training setting. Did you mean steps?"),
        ({"model": {"layer": 3}}, "model.layer is not a training setting. Did you mean model.layers?"),
        ({"model": 3}, "a table of sizes"),
        ({"model": {"width": 7}}, "width must be a multiple of heads"),
        ({"model": {"epsilon": "small"}}, "epsilon must be a number"),
        ({"steps": 0}, "steps must be a whole number of at least 1; got 0"),
        ({"steps": 1.5}, "steps must be a whole number, got 1.5"),
        ({"steps": True}, "steps must be a whole number, got True"),
        ({"mask_documents": 1}, "mask_documents must be true or false, got 1"),
        ({"betas": [0.9]}, "betas must be two numbers"),
        ({"betas": [0.9, 1.0]}, "betas must be two numbers from 0 to below 1"),
        ({"held_out": 1}, "something must be trained on"),
        ({"held_out": -0.1}, "held_out must be a share"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0"),
        ({"clip": -1}, "clip must be at least 0"),
        ({"schedule": "linear"}, "schedule must be one of cosine, constant then decay, inverse square root"),
        ({"label_smoothing": 1}, "label_smoothing must be below 1"),
        ({"languages": ["en", "en"]}, "languages must be two endings"),
        ({"pairs": [3]}, "pairs must be a text, or a list of texts"),
        ({"model": {"kind": "lstm"}}, "model.kind must be one of gpt2, recurrent, transformer; got 'lstm'"),
        ({"model": {"kind": "transformer", "hidden": 3}}, "model.hidden is not a training setting"),
        ({"model": {"kind": "transformer", "width": 33}}, "width must be a multiple of heads"),
        ({"model": {"kind": "recurrent", "attention": "dot"}}, "attention must be None or"),
        ({"model": {"kind": "recurrent"}, "batch": 3}, "batch does not apply to a model of the kind 'recurrent'"),
        ({"batch_tokens": 3}, "batch_tokens does not apply to a model of the kind 'gpt2'"),
        ({"precision": "float16"}, "precision must be one of float32, bfloat16"),
        ({"vocabulary": "words"}, "vocabulary must be letters, gpt2 or a number"),
        ({"out": ""}, "out must be a folder"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name(table, says):
    with pytest.raises(ConfigError, match=says):
        TrainConfig.from_table(table)


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no"):
        TrainConfig.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("steps: 3")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        TrainConfig.read(tmp_path / "bad.toml")
    (tmp_path / "deep.toml").write_text(f"steps = {'[' * 100_000}")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        TrainConfig.read(tmp_path / "deep.toml")


@pytest.mark.parametrize("field", dataclasses.fields(TrainConfig), ids=lambda field: field.name)
def test_a_run_that_goes_on_may_change_what_the_weights_do_not_hear_of_and_nothing_else(field, tmp_path):
    other = {"vocabulary": "gpt2", "schedule": "constant then decay", "precision": "bfloat16", "betas": (0.5, 0.5)}
    other |= {"model": dataclasses.replace(SIZES, dropout=0.5), "mask_documents": True, "held_out": 0.5}
    other |= {"label_smoothing": 0.1, "languages": ("en", "de")}
    other |= {"final_rate": 0.3, "decay_share": 0.3, "engine": "fsdp", "activation_checkpointing": True, "compile": True}
    config = TrainConfig(model=TranslatorSizes("recurrent", {})) if field.name in PAIR_SETTINGS else TrainConfig()
    value = getattr(config, field.name)
    new = other[field.name] if field.name in other else value + type(value)("7")
    changed = dataclasses.replace(config, **{field.name: new})
    free = ["corpus", "out", "steps", "keep", "prompt", "peak_tflops", "engine", "activation_checkpointing", "compile"]
    if field.name in free or field.name.startswith(("evaluate", "sample", "checkpoint", "observe")):
        refuse_different_run(config, changed, tmp_path)
    else:
        name = "model.dropout" if field.name == "model" else field.name
        with pytest.raises(ConfigError, match=f"^{name} is "):
            refuse_different_run(config, changed, tmp_path)


def test_a_translators_config_is_the_same_after_it_was_written_and_read_and_says_nothing_of_texts():
    asked = {"kind": "recurrent", "attention": "additive", "hidden": 24}
    config = TrainConfig.from_table({"pairs": "a.tsv", "languages": ["de", "en"], "vocabulary": 300, "model": asked})
    assert config.pairs == ("a.tsv",)
    assert TrainConfig.from_table(tomllib.loads(str(config))) == TrainConfig.from_table(config.to_table()) == config
    assert "held_out" not in str(config)
    assert "pairs" not in str(TrainConfig())
    plain = TrainConfig.from_table(config.to_table(), model={"hidden": 48})
    assert (plain.model.sizes["attention"], plain.model.sizes["hidden"]) == ("additive", 48)


def test_every_field_says_what_it_is():
    assert all(field.metadata["says"] for field in dataclasses.fields(TrainConfig) if field.name != "model")
