"""Observation: the kind of each head every n steps, which shows how heads form.

The same two inputs are recorded each time: the given words, and the probe of `regard.probe_heads`, random tokens that are
repeated once, in which only a head that attends to what followed the earlier occurrence can predict the next token.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from regard.errors import ConfigError
from regard.evaluation_mode import evaluate_mode
from regard.observe.classification.head_classification import heads
from regard.observe.classification.head_kinds import THRESHOLDS
from regard.observe.head_table import Head, Heads
from regard.observe.record import record
from regard.probe.probe_heads import probe_heads
from regard.text.byte_pair import END
from regard.train.listeners.json_lines import JsonLinesFile
from regard.train.training_loop import is_due
from regard.train.training_state import Report, Training

MOST = 128  # most tokens of a text


class HeadObserver:
    """A listener that writes heads.jsonl: step, layer, head, the text it was observed on, its kind and every score."""

    def __init__(self, path: Path, every: int, text: str = "") -> None:
        if every < 1:
            raise ConfigError(f"heads must be observed every 1 step or more, got {every}.")
        self.every, self.text = every, text
        self._lines = JsonLinesFile(path)

    def __call__(self, training: Training, report: Report) -> None:
        if report.step == 1 or is_due(self.every, report.step) or report.step == training.config.steps:
            rows = list(self.observe_heads(training, report.step))
            if training.is_first_process:
                self._lines.append_rows(report.step, rows)

    def observe_heads(self, training: Training, step: int) -> Iterator[dict[str, Any]]:
        """Yield a row for each head on each text; the model's mode and torch's random state are left unchanged."""
        tokens = self.encode_observed_text(training)
        with evaluate_mode(training.model), torch.no_grad(), record(training.model) as recording:
            training.model(tokens)
        for head in heads(recording, tokens=tokens.cpu(), classes={}):
            yield make_row(head, step, "text")
        for head in probe_model(training):
            yield make_row(head, step, "repeated")

    def encode_observed_text(self, training: Training) -> torch.Tensor:
        """Return the tokens (1, t) of the given text, or of the first held-out row, or training row if nothing is held out."""
        if self.text:
            found: Sequence[int] = training.task.text.encode(self.text)
        else:
            found = (training.held_out or training.reader).read(0).tokens[0].tolist()
        if len(found) < 2:
            raise ConfigError(f"a text in which heads are observed must have at least two tokens, got {len(found)}.")
        return torch.tensor([found[: min(training.config.gpt2.context, MOST)]], device=training.engine.device)


def make_row(head: Head, step: int, on: str) -> dict[str, Any]:
    """Return the line of a head: every score that is known, and the limits of the interval of those that name a head."""
    scores = {name: round(float(score), 4) for name, score in head.scores.items() if score == score}
    for name in (*THRESHOLDS, "copying"):
        score = head.scores.get(name)
        if score is not None and score.low == score.low:
            scores |= {f"{name} low": round(score.low, 4), f"{name} high": round(score.high, 4)}
    return {"step": step, "layer": head.layer, "head": head.head, "on": on, "kind": head.kind, **scores}


def probe_model(training: Training) -> Heads:
    """Probe the heads of the model in training, on the same repeated random tokens each time."""
    text, context = training.task.text, training.config.gpt2.context
    return probe_heads(training.model, vocabulary=text.vocabulary, begin=text.special.get(END), context=context, ablate="none")
