"""audit: what policies of sparse attention and cache compression drop, exactly, for every row of a recording."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.html_repr import HtmlRepr
from regard.map.pooling import bin_edges
from regard.mechanism.arguments import check_choice, check_count, check_index, check_instance, check_sequence, describe_value
from regard.mechanism.mask_algebra import Mask
from regard.observe.recording import Recording
from regard.policies import AttentionInputs, Policy, check_causality
from regard.policies.parse_policy import Policies, list_policies
from regard.policies.policy import label_policies
from regard.policy_audit.certificate import CERTIFIED_ROWS, AuditCertificate, certify_layer, join_certificates
from regard.policy_audit.measure import change_inputs, compute_dropped_weights, measure_layer
from regard.policy_audit.recorded_inputs import find_prompt, read_inputs
from regard.policy_audit.row_measures import RowMeasures
from regard.policy_audit.summary import Summary, format_positions, format_summaries, summarize_part

Watch = Callable[[Iterable[Any], int], Iterable[Any]]
PARTS = ("generated", "prompt")
MEASURES = ("recall", "kl", "output_error", "kept", "dropped_distance")


@dataclass(frozen=True)
class WorstRow:
    """A row of which a policy keeps little: where it is, what it keeps, and the key of which most is dropped.

    Of a dropped key that is its weight in the complete row, of a key that the policy changes by how much its weight falls.
    """

    policy: str
    layer: int
    batch: int
    head: int
    query: int
    recall: float
    key: int | None  # None if the row keeps everything
    weight: float  # that is dropped of that key
    word: str | None = None  # of the query
    key_word: str | None = None

    @property
    def sentence(self) -> str:
        """What was dropped, in a sentence."""
        query = format_place(self.query, self.word)
        kept = f"{self.policy} keeps {self.recall:.2%} of the attention of head {self.layer}.{self.head} at query {query}"
        if self.key is None:
            return f"{kept}."
        return f"{kept}; most of what it drops is on key {format_place(self.key, self.key_word)}: {self.weight:.2%}."


def format_place(place: int, word: str | None) -> str:
    """Return a position with its word, if that is known."""
    return f"{place:,}" if word is None else f"{place:,} {word!r}"


@dataclass(frozen=True, eq=False)
class Audit(HtmlRepr):
    """What each policy keeps in every row: recall, kl (nats), output_error and kept (keys), each (policy, layer, b, h, q).

    recall is the share of a row's weights on the keys that the policy lets it use, exp(lse_kept - lse), and kl is
    KL(kept || complete) = -log recall. Of a policy that changes keys instead, recall is Σ min(p, p'), what the weights have in
    common. The total variation is 1 - recall. output_error is `|o_kept - o| / |o|` of the head's
    output. A sink of the model counts as kept. dropped_distance, of the same shape, is how far before the query what is dropped
    lies, in tokens, in the mean over the dropped weight; NaN where that is less than 0.0001, and of a policy that changes keys.
    The first `prompt` queries are those of the prompt. certificate is how far some rows are from those computed in float64.
    """

    policies: tuple[Policy, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    prompt: int
    recall: Tensor
    kl: Tensor
    output_error: Tensor
    kept: Tensor
    dropped_distance: Tensor
    certificate: AuditCertificate
    words: Any = field(default=None, repr=False)
    recording: Recording | None = field(default=None, repr=False)

    @property
    def labels(self) -> tuple[str, ...]:
        """The policies as text, each another one."""
        return label_policies(self.policies)

    def read_inputs(self, layer: int) -> AttentionInputs:
        """Return what the policies decided from in a layer, by its place in `layers`."""
        assert self.recording is not None
        return read_inputs(self.recording, self.layers[layer], self.prompt)

    def select_rows(self, part: str) -> slice:
        """Return the queries of a part, "generated" or "prompt". Raises ConfigError for another name."""
        if part not in PARTS:
            raise ConfigError(f"part must be 'generated' or 'prompt'; got {part!r}.")
        return slice(self.prompt, None) if part == "generated" else slice(self.prompt)

    def summarize(self, part: str = "generated") -> list[Summary]:
        """Return a row for each policy: the keys it keeps, and mean, quantiles and extremes of what is measured."""
        rows = self.select_rows(part)
        return [
            summarize_part(label, part, *(x[n, ..., rows] for x in (self.recall, self.kl, self.output_error, self.kept)))
            for n, label in enumerate(self.labels)
        ]

    def average_by_position(self, measure: str = "recall", bins: int = 8) -> tuple[Tensor, Tensor]:
        """Return the edges of runs of queries, (bins + 1,), and the mean of a measure in each of them, (policy, layer, bins).

        measure is the name of a tensor, such as "recall" or "dropped_distance"; NaN does not count.
        """
        check_choice("measure", measure, MEASURES)
        check_count("bins", bins)
        edges = bin_edges(0, self.recall.shape[-1], min(bins, self.recall.shape[-1]))
        parts = getattr(self, measure).double().split(edges.diff().tolist(), -1)
        return edges, torch.stack([part.nanmean((2, 3, 4)) for part in parts], -1)

    def find_worst(self, n: int = 5, policy: int = 0) -> list[WorstRow]:
        """Return the n rows of which a policy keeps least, each with the key of which most is dropped."""
        check_count("n", n)
        number = check_index("policy", policy, len(self.policies), "policies")
        lowest = self.recall[number].flatten().argsort()[:n]
        places = torch.stack(torch.unravel_index(lowest, self.recall.shape[1:]), 1).tolist()
        inputs = {layer: self.read_inputs(layer) for layer in {place[0] for place in places}}
        changes = {layer: change_inputs(self.policies[number], one) for layer, one in inputs.items()}
        return [self.describe_row(number, inputs[place[0]], *changes[place[0]], *place) for place in places]

    def describe_row(
        self, policy: int, inputs: AttentionInputs, mask: Mask, changed: AttentionInputs | None, *place: int
    ) -> WorstRow:
        """Return what a policy drops from one row, by the place of its numbers in `recall`: layer, b, h, query."""
        layer, b, h, query = place
        dropped = compute_dropped_weights(inputs, mask, changed, b, h, query)
        weight = float(dropped.max())
        key = int(dropped.argmax()) if weight > 0 else None
        words = self.words if self.words is None or isinstance(self.words[0], str) else self.words[b]
        names = [None if words is None or one is None else words[one] for one in (query, key)]
        recall = float(self.recall[policy, *place])
        return WorstRow(self.labels[policy], self.layers[layer], b, self.heads[h], query, recall, key, weight, *names)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the summaries of both parts as plain values, for JSON."""
        return [
            asdict(row) for part in PARTS if self.recall[0, ..., self.select_rows(part)].numel() for row in self.summarize(part)
        ]

    def to_pandas(self) -> Any:
        """Return a DataFrame, a line for each policy, layer, batch row, head and part. Raises ConfigError without pandas."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise ConfigError("a DataFrame needs pandas, which is not installed: pip install pandas.") from None
        lines = []
        for part in PARTS:
            rows = self.select_rows(part)
            means = [x[..., rows].double().mean(-1) for x in (self.recall, self.kl, self.output_error, self.kept)]
            for place in torch.cartesian_prod(*(torch.arange(size) for size in self.recall.shape[:4])).tolist():
                policy, layer, b, h = place
                line = {
                    "policy": self.labels[policy],
                    "layer": self.layers[layer],
                    "batch": b,
                    "head": self.heads[h],
                    "part": part,
                }
                numbers = [float(x[policy, layer, b, h]) for x in means]
                lines.append(line | dict(zip(("recall", "kl", "output_error", "kept"), numbers, strict=True)))
        return pandas.DataFrame(lines)

    def format_lines(self, width: int = 80, part: str = "generated") -> list[str]:
        """Return the table of a part as lines of at most `width` columns."""
        return format_summaries(self.summarize(part), width)

    def format_positions(self, width: int = 80) -> list[str]:
        """Return the mean recall of each policy by the position of the query as aligned lines of at most `width` columns."""
        edges, means = self.average_by_position()
        return format_positions(self.labels, edges.tolist(), means.mean(1).tolist(), width)

    def __repr__(self) -> str:
        return f"Audit({', '.join(self.labels)}; {len(self.layers)} layers of {len(self.heads)} heads)"

    def __str__(self) -> str:
        queries = self.recall.shape[-1]
        rows = f"{queries - self.prompt:,} queries after a prompt of {self.prompt:,}"
        return "\n".join([f"{rows}, in {len(self.layers)} layers of {len(self.heads)} heads", *self.format_lines()])


def audit(
    recording: Recording,
    policies: Policies,
    *,
    prompt: int | None = None,
    layers: Sequence[int] | None = None,
    certified_rows: int = CERTIFIED_ROWS,
    watch: Watch = lambda layers, count: layers,
) -> Audit:
    """Measure what policies drop from the attention of a recorded model, exactly, for every layer, head and query.

    The recording must have kept the values. policies are values of regard.policies, or text as regard.policies.parse_policy
    takes it: audit(recording, "h2o:budget=0.1"). prompt is the number of tokens that are read at once: by default the prompt
    of a recorded generation, else half of the text. layers are numbers of layers, all by default; policies count them in the
    recording, so record all of them for a policy that differs between layers. certified_rows is how many rows of each head are
    computed anew in float64, for the certificate. A policy that is not of regard.policies is first tested: one
    that looks ahead is refused. Raises ConfigError.
    """
    check_instance("recording", recording, Recording, "Record with regard.record(model, keep='values').")
    if not callable(watch):
        raise ConfigError(f"watch must be a function of the layers and their number, got {describe_value(watch)}.")
    check_count("certified_rows", certified_rows)
    count = len(recording.layers())
    chosen = check_policies(policies, count)
    numbers = (
        range(count)
        if layers is None
        else [check_index("a layer", one, count, "layers") for one in check_sequence("layers", layers)]
    )
    if not numbers:
        raise ConfigError("there are no layers to audit: record a model with self-attention, and pass layers=None for all.")
    length = find_prompt(recording, prompt, recording.map(numbers[0]).shape[2])
    found, certificates = [], []
    for number in watch(numbers, len(numbers)):
        inputs = read_inputs(recording, number, length)
        for policy in chosen if number == numbers[0] else ():
            refuse_lookahead(policy, inputs)
        measured, masks = measure_layer(inputs, chosen)
        found.append(measured)
        certificates.append(certify_layer(inputs, chosen, masks, measured, certified_rows))
    if len({one.recall.shape for one in found}) > 1:
        raise ConfigError("the layers have different numbers of heads: audit those of one kind at a time, with layers=.")
    measures: dict[str, Any] = {
        one.name: torch.stack([getattr(layer, one.name) for layer in found], 1) for one in fields(RowMeasures)
    }
    words, heads = recording.words(numbers[0])[1], recording.heads(numbers[0])
    return Audit(
        tuple(chosen),
        tuple(numbers),
        heads,
        length,
        **measures,
        certificate=join_certificates(certificates),
        words=words,
        recording=recording,
    )


def check_policies(policies: Policies, count: int) -> list[Policy]:
    """Return policies as a list. Raises ConfigError if there is none, or one is none or not for this number of layers."""
    chosen = list_policies(policies)
    if not chosen:
        raise ConfigError("policies is empty: pass at least one, such as regard.policies.SnapKV(budget=0.1).")
    for one in chosen:
        check_layers(one, count)
    return chosen


def check_layers(policy: Policy, count: int) -> None:
    """Raise ConfigError if a shipped policy that differs between layers is for another number of them, or OutOfRangeError."""
    if not type(policy).__module__.startswith("regard.policies."):
        return  # whose attributes of these names may be anything
    budget, pairs = getattr(policy, "budget", None), getattr(policy, "retrieval", ())
    if isinstance(budget, tuple) and len(budget) != count:
        raise ConfigError(
            f"{policy.label} has a budget for {len(budget)} layers, but the recording has {count}: record all layers, and pass "
            "a budget for each."
        )
    for layer, _ in pairs:
        check_index("a layer of retrieval", layer, count, "the recording")


def refuse_lookahead(policy: Policy, inputs: AttentionInputs) -> None:
    """Raise ConfigError if a policy that was not shipped here looks ahead, by drawing the last tokens anew."""
    is_shipped = type(policy).__module__.startswith("regard.policies.")
    if not is_shipped and inputs.prompt < inputs.tokens:
        for cut in {inputs.prompt, (inputs.prompt + inputs.tokens) // 2}:
            check_causality(policy, inputs, cut)
