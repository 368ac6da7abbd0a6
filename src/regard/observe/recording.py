"""Recording: all recorded calls and runs of a model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import ConfigError, MissingNameError
from regard.html_repr import HtmlFragment, HtmlRepr
from regard.map import AttentionMap
from regard.mechanism.arguments import (
    check_count,
    check_instance,
    check_path,
    describe_value,
)
from regard.observe.attribution import Attribution, attribute
from regard.observe.files import safetensors_file
from regard.observe.files.serialize import serialize_recording
from regard.observe.implicit_history import ImplicitCall
from regard.observe.interception.attention_call import MissedCall, OtherWeights
from regard.observe.recorded_runs.part_names import count_calls, describe_module, find_module_path, join_names
from regard.observe.recorded_runs.run import Call, LayerReader, Run
from regard.observe.recorded_runs.words import TextPair, find_decoder
from regard.observe.token_places.places import CROSS, Place, Places, check_places, select_places
from regard.terminal_escapes import escape_controls

MOST_NAMES = 3  # of modules, in one sentence
HELP = "recording.missed has the reasons, and regard.attends names the weights of your own code (docs/record.md)."
NEITHER = "Either the model was not called, or no layer of it that record was to keep computed attention that it can follow"


@dataclass(eq=False)
class Recording(LayerReader, HtmlRepr):
    """Every recorded call and run, and one map for each layer of the last run."""

    model: str = ""
    runs: list[Run] = field(default_factory=list)
    missed: list[MissedCall] = field(default_factory=list)
    tokens: Any = field(default_factory=lambda: None)  # words of the last run, {"rows": ..., "columns": ...}, or a tokenizer
    notes: list[str] = field(default_factory=list)  # modules of which more than q, k and a rule is stored, with the bytes
    places: Places | None = None  # the patches of an image, or the times of sound, that tokens stand for
    other_weights: list[OtherWeights] = field(default_factory=list)  # normalized, of no known pair of tokens
    last_number: int = -1  # which of the runs, which are in the order they began, is the last one

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tokens" and self.runs:
            set_run_tokens(self, value)
            return
        if name == "tokens":
            value = TextPair.from_tokens(value)
        elif name == "places":
            value = check_places(value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return the words of the last run as `tokens`, where none were set before it ran."""
        if name != "tokens":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.last.tokens

    @property
    def calls(self) -> list[Call | ImplicitCall]:
        """All calls of all runs, in order."""
        return [call for run in self.runs for call in run.calls]

    @property
    def names(self) -> list[str]:
        """The recorded modules, in the order they first ran."""
        return list(dict.fromkeys(call.name for call in self.calls))

    def __getitem__(self, name: str) -> list[Call | ImplicitCall]:
        """Return the calls of a module, by its path. Raises MissingNameError if it was not recorded."""
        check_instance("a name in a recording", name, str, "Use recording.calls[n] for a call by number.")
        found = [call for call in self.calls if call.name == name]
        if not found:
            raise MissingNameError(f"no call of {describe_value(name)} was recorded. Recorded: {join_names(self.names)}.")
        return found

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the recorded modules, as a dictionary does over its keys."""
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        """Return whether a module of this name was recorded."""
        return name in self.names

    @property
    def last(self) -> Run:
        """The run that `generate` returned last, or one that began later. Raises ConfigError if nothing was recorded."""
        if not self.runs:
            first = self.missed[0] if self.missed else None
            why = f"{describe_module(first.module)}: {first.reason}" if first else next(iter(self.notes), NEITHER)
            raise ConfigError(f"nothing was recorded. {why}.")
        return self.runs[self.last_number]

    def _get_run(self) -> Run:
        return self.last

    def attribute(self, number: Tensor, layers: Sequence[int | str] | None = None) -> Attribution:
        """Return what the weights did to a number of the recorded forward; see regard.observe.attribution.attribute."""
        return attribute(self, number, layers)

    def axis_places(self, layer: int | str, kind: str = "self", part: str | None = None) -> tuple[list[Place], list[Place]]:
        """Return the places of the queries and of the keys of a layer of the last run: several for several images, or none.

        The queries of cross attention are of another text, and have none unless a grid is of them alone, without has_keys; nor
        have those of a grid without has_queries.
        """
        name = self.last.find_path(layer, kind, part)
        path = find_module_path(name)
        found = select_places(self.places, kind, path)
        if path != name and len(found) > 1:  # which of the images a call reads is not known
            found = []
        keys = [one for one in found if getattr(one, "has_keys", True)]
        has_queries = kind != CROSS and all(getattr(one, "has_queries", True) for one in keys)
        queries = [one for one in found if not getattr(one, "has_keys", True)]
        return queries or (keys if has_queries else []), keys

    def save(self, path: str | Path) -> None:
        """Write the recording to one file, atomically; regard.load reads it back, exact to the bit."""
        safetensors_file.write_file(Path(check_path("path", path)), *serialize_recording(self))

    def page(
        self,
        height: int = 720,
        *,
        scores: Sequence[Callable[[AttentionMap], Tensor]] = (),
        image: Any = None,
        attribution: Attribution | None = None,
        number: str | None = None,
    ) -> HtmlFragment:
        """Return the page of the recording for the output cell of a notebook, `height` pixels high, as regard.page writes it.

        It is one file in a frame that can reach neither the notebook nor the network. The others are those of regard.page.
        """
        named = {} if number is None else {"number": number}
        settings = {"scores": scores, "image": image, "attribution": attribution, **named}
        frame_page = import_module(str(HtmlRepr.renderer)).frame_page
        found: HtmlFragment = frame_page(self, check_count("height", height, 1), **settings)
        return found

    def __repr__(self) -> str:
        missed = f", {len(self.missed)} missed" if self.missed else ""
        model = escape_controls(self.model)
        runs = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        return f"Recording({model}, {runs}, {count_calls(len(self.calls), len(self.names))}{missed})"

    def __str__(self) -> str:
        return "\n".join(filter(None, (repr(self), self.describe_missed())))

    def describe_missed(self) -> str:
        """Return one sentence on the modules of which nothing was recorded, naming at most three; "" if there are none."""
        recorded = {*self.names}
        modules = [*dict.fromkeys(one.module for one in self.missed if one.module not in recorded)]
        if not modules:
            return ""
        more = f" and {len(modules) - MOST_NAMES} more" if len(modules) > MOST_NAMES else ""
        names = ", ".join(map(describe_module, modules[:MOST_NAMES]))
        return f"Nothing was recorded of {escape_controls(names)}{more}: {HELP}"


def set_run_tokens(recording: Recording, tokens: Any) -> None:
    """Set the words of the last run, or of every run that read token ids by a tokenizer.

    A recording that is being built of runs, as one that is loaded, leaves those that have words as they are.
    """
    vars(recording).pop("tokens", None)
    last = recording.last
    if "notes" not in vars(recording):
        last.tokens = TextPair.from_tokens(tokens) if last.tokens is None else last.tokens
        return
    has_ids = find_decoder(tokens) is not None
    for run in recording.runs:
        if run is last or (has_ids and run.ids is not None):
            run.place_tokens(tokens, recording.places is not None)
