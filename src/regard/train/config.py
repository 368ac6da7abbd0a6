"""TrainConfig: all settings of a training run, validated on creation; read from a TOML file or command-line flags."""

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from regard.errors import ConfigError
from regard.models import GPT2Config
from regard.train.translator_sizes import GPT2_KIND, TranslatorSizes, list_arguments

DEFAULT_MODEL: dict[str, Any] = {
    "layers": 4,
    "heads": 4,
    "width": 128,
    "context": 64,
}  # the default: small enough for two cores
PRECISIONS = ("float32", "bfloat16")
ENGINES = ("ddp", "fsdp")
SCHEDULES = ("cosine", "constant then decay", "inverse square root")
# at least 1
POSITIVE_SETTINGS = ("steps", "batch", "accumulate", "keep", "evaluate_batches", "sample_tokens", "patience", "batch_tokens")
# at least 0
NONNEGATIVE_SETTINGS = ("warmup", "evaluate_every", "sample_every", "checkpoint_every", "observe_every", "seed", "most_words")
MOST = 1 << 53  # largest whole number: a float holds it exactly
MOST_PARAMETERS = 1 << 50  # of a planned model; one that is trained must fit into memory
SHARE_SETTINGS = ("held_out", "final_rate", "decay_share", "label_smoothing")  # from 0 to 1
TEXT_SETTINGS: tuple[str, ...] = ("text", "start", "held_out", "batch", "mask_documents", "observe_every", "observe_text")
TEXT_SETTINGS += ("compile", "activation_checkpointing")
PAIR_SETTINGS = ("pairs", "languages", "batch_tokens", "most_words")


def make_fixed_field(default: Any, says: str) -> Any:
    """Return a dataclass field with a short description."""
    return field(default=default, metadata={"says": says})


def make_changeable_field(default: Any, says: str) -> Any:
    """Return a dataclass field that may change when a run is resumed, because the weights do not depend on it."""
    return field(default=default, metadata={"says": says, "free": True})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run: its data, its model, how it learns, and what is printed and saved on the way."""

    corpus: str = make_changeable_field("", "a folder that regard.text.corpus.prepare wrote, or regard.text.pairs.prepare")
    text: str = make_fixed_field("", "a text to prepare first, into out/corpus: a file, a folder of texts, JSON lines")
    vocabulary: str = make_fixed_field(
        "", "of that text: letters, the default, gpt2, or the number of pieces to learn; a start has its own"
    )
    held_out: float = make_fixed_field(0.1, "the share of the tokens, the last ones, that is not trained on")
    start: str = make_fixed_field("", "a model to start from, a folder or a name like gpt2; by default random weights")
    out: str = make_changeable_field("run", "the folder of the run: checkpoints, log, model; a run that is in it is resumed")
    model: GPT2Config | TranslatorSizes = field(default=GPT2Config(**DEFAULT_MODEL))
    steps: int = make_changeable_field(2000, "updates of the weights")
    batch: int = make_fixed_field(12, "rows of the model's context at a time")
    accumulate: int = make_fixed_field(1, "batches for one update")
    learning_rate: float = make_fixed_field(1e-3, "at its highest")
    warmup: int = make_fixed_field(100, "steps in which the rate rises to it")
    schedule: str = make_fixed_field("cosine", "how it falls: cosine, constant then decay, or inverse square root")
    decay_share: float = make_fixed_field(0.2, "of all steps, those of the decay after constant")
    final_rate: float = make_fixed_field(0.1, "the rate at the end, as a share of the highest")
    weight_decay: float = make_fixed_field(0.1, "of matrices; biases and norms have none")
    betas: tuple[float, float] = make_fixed_field((0.9, 0.99), "of AdamW")
    clip: float = make_fixed_field(1.0, "the largest gradient norm; 0 for no limit")
    label_smoothing: float = make_fixed_field(0.0, "the share of a target that is spread over all words")
    seed: int = make_fixed_field(0, "of the first weights, the order of the text and dropout")
    precision: str = make_fixed_field("float32", "of the products: float32, or bfloat16 (weights stay float32)")
    engine: str = make_changeable_field(
        "ddp", "of several processes, which torchrun starts: ddp, or fsdp (weights in parts too)"
    )
    activation_checkpointing: bool = make_changeable_field(
        False, "keep only a block's input and recompute the rest: less memory"
    )
    compile: bool = make_changeable_field(False, "the blocks, with torch.compile")
    mask_documents: bool = make_fixed_field(False, "a token does not attend to earlier documents")
    spike: float = make_fixed_field(8.0, "deviations above the running loss from which a batch is skipped; 0 for never")
    patience: int = make_fixed_field(10, "batches skipped in a row until the run stops")
    evaluate_every: int = make_changeable_field(250, "steps between two evaluations on the held-out text; 0 for never")
    evaluate_batches: int = make_changeable_field(20, "of the held-out text, each time the same")
    sample_every: int = make_changeable_field(0, "steps between two samples; 0 for never")
    sample_tokens: int = make_changeable_field(60, "of a sample")
    prompt: str = make_changeable_field(
        "", "what a sample begins with; by default the end of text, or the held-out text's first token"
    )
    checkpoint_every: int = make_changeable_field(250, "steps between two checkpoints; 0 for one at the end")
    keep: int = make_changeable_field(2, "checkpoints to keep, besides the best")
    observe_every: int = make_changeable_field(0, "steps between two classifications of the heads; 0 for never")
    observe_text: str = make_changeable_field(
        "", "the text to classify the heads on; by default the held-out text's first tokens"
    )
    peak_tflops: float = make_changeable_field(0.0, "of one process's machine; 0 to measure it at the start")
    pairs: tuple[str, ...] = make_fixed_field((), "for a translator: files of sentence pairs to prepare first, into out/corpus")
    languages: tuple[str, ...] = make_fixed_field(("en", "fr"), "the endings of aligned files, the source language first")
    batch_tokens: int = make_fixed_field(4096, "of a batch of pairs, on its longer side, padding included")
    most_words: int = make_fixed_field(0, "of a side of a pair; those with more are left out; 0 for no limit")

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(TrainConfig).items():
            object.__setattr__(self, name, convert_value(name, kind, getattr(self, name)))
        if self.text and not (self.vocabulary or self.start):
            object.__setattr__(self, "vocabulary", "letters")
        for least, names in ((1, POSITIVE_SETTINGS), (0, NONNEGATIVE_SETTINGS)):
            for name in names:
                value = getattr(self, name)
                expected = f"a whole number of at least {least}" if value < least else f"{MOST:,} at most"
                check_setting(name, least <= value <= MOST, expected, value)
        for name in SHARE_SETTINGS:
            check_setting(name, 0 <= getattr(self, name) <= 1, "a share, from 0 to 1", getattr(self, name))
        for name in ("weight_decay", "clip", "spike", "peak_tflops"):
            check_setting(name, 0 <= getattr(self, name) < math.inf, "at least 0", getattr(self, name))
        check_setting("label_smoothing", self.label_smoothing < 1, "below 1", self.label_smoothing)
        check_setting("languages", len({*self.languages}) == 2, "two endings", self.languages)
        check_setting("held_out", self.held_out < 1, "below 1: something must be trained on", self.held_out)
        check_setting("learning_rate", 0 < self.learning_rate < math.inf, "above 0", self.learning_rate)
        check_setting("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1", self.betas)
        check_setting("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}", self.schedule)
        check_setting("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}", self.precision)
        check_setting("engine", self.engine in ENGINES, f"one of {', '.join(ENGINES)}", self.engine)
        check_setting("out", self.out != "", "a folder", self.out)
        is_count = self.vocabulary.isdecimal() and len(self.vocabulary) < 10 and int(self.vocabulary) > 0
        check_setting(
            "vocabulary", is_count or self.vocabulary in ("", "letters", "gpt2"), "letters, gpt2 or a number", self.vocabulary
        )
        self.refuse_inapplicable_settings()
        if isinstance(self.model, GPT2Config):
            parameters = self.model.parameters
            check_setting("model", parameters <= MOST_PARAMETERS, f"of {MOST_PARAMETERS:,} parameters at most", parameters)

    @property
    def gpt2(self) -> GPT2Config:
        """The sizes of a GPT-2; raises ConfigError if the model is of another kind."""
        if not isinstance(self.model, GPT2Config):
            raise ConfigError(f"model.kind is {self.model.kind!r}, but this needs a GPT-2.")
        return self.model

    @property
    def inapplicable_settings(self) -> tuple[str, ...]:
        """The settings that do not apply to this kind of model."""
        return TEXT_SETTINGS if isinstance(self.model, TranslatorSizes) else PAIR_SETTINGS

    def refuse_inapplicable_settings(self) -> None:
        """Raise ConfigError for a setting that does not apply to this kind of model."""
        kind = self.model.kind if isinstance(self.model, TranslatorSizes) else GPT2_KIND
        for one in fields(self):
            if one.name in self.inapplicable_settings and getattr(self, one.name) != one.default:
                instead = "only a gpt2 predicts a text" if one.name in TEXT_SETTINGS else "[model] kind says which translator"
                raise ConfigError(f"{one.name} does not apply to a model of the kind {kind!r}: {instead}. Leave it out.")

    @classmethod
    def read(cls, path: str | Path, **flags: Any) -> "TrainConfig":
        """Read the config in a TOML file, whose [model] table holds GPT2Config's fields, or a translator's kind and arguments.

        Flags override the file.
        """
        return cls.from_table(read_table(path), **flags)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], **flags: Any) -> "TrainConfig":
        """Return the config of a table, with flags overriding it; "model" in either is a [model] table or a part of one."""
        sizes = table.get("model", {})
        if not isinstance(sizes, Mapping):
            raise ConfigError(f"[model] must be a table of sizes, for example layers = 4; got {sizes!r}.")
        settings = {**table, **flags}
        check_setting_names(settings, [one.name for one in fields(cls)], "")
        return cls(**{**settings, "model": parse_model_table({**sizes, **flags.get("model", {})})})

    def to_table(self) -> dict[str, Any]:
        """Return the config as a table that `of` accepts, of values that JSON and TOML can represent."""
        table = {one.name: getattr(self, one.name) for one in fields(self)}
        lists = {name: list(value) for name, value in table.items() if isinstance(value, tuple)}
        return {**table, **lists, "model": make_model_table(self.model)}

    def __str__(self) -> str:
        """Return the whole config in TOML, without the settings that do not apply to the kind of model."""
        table = self.to_table()
        sizes = table.pop("model")
        for name in self.inapplicable_settings:
            del table[name]
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in table.items()]
        return "\n".join([*lines, "", "[model]", *(f"{name} = {json.dumps(value)}" for name, value in sizes.items())])


def read_table(path: str | Path) -> dict[str, Any]:
    """Read the table in a TOML file."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {path}. A config is a TOML file, for example with steps = 2000.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.") from None


def parse_model_table(table: Mapping[str, Any]) -> GPT2Config | TranslatorSizes:
    """Return the sizes in a [model] table."""
    kind, sizes = table.get("kind", GPT2_KIND), {name: value for name, value in table.items() if name != "kind"}
    if kind != GPT2_KIND:
        check_setting_names(sizes, list(list_arguments(kind)), "model.")
        return TranslatorSizes(kind, sizes)
    check_setting_names(sizes, [one.name for one in fields(GPT2Config)], "model.")
    try:
        return GPT2Config(**{**DEFAULT_MODEL, **sizes})
    except TypeError as error:  # a string where a size's range is checked
        raise ConfigError(f"a size in [model] is not a number: {error}.") from None


def make_model_table(model: GPT2Config | TranslatorSizes) -> dict[str, Any]:
    """Return sizes as a table that `parse_model_table` accepts."""
    return model.to_table() if isinstance(model, TranslatorSizes) else asdict(model)


def convert_value(name: str, kind: Any, value: Any) -> Any:
    """Return a value of a field's type, an int converted to a float if needed; raise ConfigError for another type."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == tuple[float, float]:
        if isinstance(value, list | tuple) and len(value) == 2 and all(type(one) in (int, float) for one in value):
            return float(value[0]), float(value[1])
        raise ConfigError(f"{name} must be two numbers, got {value!r}.")
    if kind == tuple[str, ...]:
        several = [value] if isinstance(value, str | Path) else value
        if isinstance(several, list | tuple) and all(isinstance(one, str | Path) for one in several):
            return tuple(map(str, several))
        raise ConfigError(f"{name} must be a text, or a list of texts; got {value!r}.")
    if kind is str and isinstance(value, Path | int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name} must be {TYPE_NAMES.get(kind, kind.__name__)}, got {value!r}.")
    return value


TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def check_setting(name: str, holds: bool, expected: str, came: Any) -> None:
    """Raise ConfigError if the value of a field is out of range."""
    if not holds:
        raise ConfigError(f"{name} must be {expected}; got {came!r}.")


def check_setting_names(table: Mapping[str, Any], names: list[str], prefix: str) -> None:
    """Raise ConfigError, with the closest field name, for a name that is not a field."""
    for name in table:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            meant = f" Did you mean {prefix}{near[0]}?" if near else f" The settings are {', '.join(names)}."
            raise ConfigError(f"{prefix}{name} is not a training setting.{meant}")


def refuse_different_run(former: TrainConfig, config: TrainConfig, folder: Path) -> None:
    """Raise ConfigError, naming the field, if a config would change the results of the run in a folder."""
    names = [one.name for one in fields(TrainConfig) if not (one.metadata.get("free") or one.name == "model")]
    if not config.vocabulary:  # that of the corpus or the start; older configs have "letters" there
        names.remove("vocabulary")
    compared = [(name, getattr(former, name), getattr(config, name)) for name in names]
    before, now = (make_model_table(one.model) for one in (former, config))
    compared += [(f"model.{name}", before.get(name), now.get(name)) for name in ("kind", *({**before, **now}))]
    for name, was, came in compared:
        if was != came:
            raise ConfigError(
                f"{name} is {came!r}, but the run in {folder} has {was!r}; a change would alter its results. "
                f"Use {was!r} to resume it, or name another folder as out."
            )
