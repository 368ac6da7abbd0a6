"""What an audit costs: four policies at once on all rows of 16 heads, against the overview of the same heads.

Where kvpress is installed, which needs a transformers below 5.3, its ObservedAttention is timed from complete matrices.
"""

import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.tables import Table
from benchmarks.timing import measure_peak_megabytes, measure_seconds
from regard.policies import H2O, TOVA, AttentionInputs, ObservedAttention, Oracle, Policy, SnapKV, StreamingLLM
from regard.policy_audit.measure import RowMeasures, measure_layer

HEADS, KEY_HEADS, WIDTH = 16, 4, 64
LENGTHS, DENSE, LONG = (2048, 4096, 8192, 32_768), 4096, 131_072
POLICIES = {
    "StreamingLLM": StreamingLLM(4, 252),
    "SnapKV": SnapKV(256),
    "H2O": H2O(256),
    "TOVA": TOVA(256),
}
TITLE = f"auditing four policies of 256 keys at once, {HEADS} heads of width {WIDTH}, float32, half of the text as the prompt"
COLUMNS = [
    "T",
    "heads",
    "overview s",
    "audit s",
    "ratio to overview",
    "choose s",
    "measure s",
    "dense s",
    "ObservedAttention s",
    "kvpress's s",
    "MiB of the audit",
    "exponents of time and memory",
]


def run(peak: dict[torch.dtype, float]) -> Table:
    """Seconds of an audit, of its two halves and of the overview, and its peak above q, k and v in a fresh process."""
    check()
    table, policies, above = Table(TITLE, COLUMNS), list(POLICIES.values()), None
    for t, heads in (*((t, HEADS) for t in LENGTHS), (LONG, 1)):
        inputs = make_inputs(t, heads)
        measure_seconds(partial(audit, make_inputs(512, heads), policies))  # what is compiled, is compiled
        rounds = 3 if t < LENGTHS[-1] else 1
        overview = take_median(lambda inputs=inputs: inputs.build_map().overview(), rounds)
        choose = take_median(lambda inputs=inputs: [one.choose_keys(inputs) for one in policies], rounds)
        both = take_median(lambda inputs=inputs: audit(inputs, policies), rounds)
        dense = take_median(lambda inputs=inputs: measure_densely(inputs, policies), 1) if t <= DENSE else None
        text = replace(inputs, prompt=t)
        observed = take_median(partial(ObservedAttention(0.1).score_keys, text), rounds)
        press = take_median(partial(score_by_kvpress, text), 1) if t == DENSE and has_kvpress() else None
        memory = measure_memory(t, heads)
        exponents = describe_exponents(above, (t, both, memory)) if above and heads == HEADS else None
        above = t, both, memory
        times = overview, both, both / overview, choose, both - choose, dense, observed, press
        table.add(t, heads, *times, memory, exponents)
    return table


def describe_exponents(above: tuple[int, float, float | None], here: tuple[int, float, float | None]) -> str | None:
    """The exponents of seconds and MiB in T, from the row above to this one."""
    (t, *before), (length, *now) = above, here
    pairs = [(x, y) for x, y in zip(before, now, strict=True) if x is not None and y is not None]
    return ", ".join(f"{math.log(y / x) / math.log(length / t):.2f}" for x, y in pairs)


def has_kvpress() -> bool:
    """Whether kvpress can be imported."""
    return importlib.util.find_spec("kvpress") is not None


def score_by_kvpress(inputs: AttentionInputs) -> Tensor:
    """The scores of kvpress's ObservedAttention for a text that is all prompt, from the complete matrices that it reads."""
    import kvpress

    k, t = inputs.k.repeat_interleave(inputs.heads_per_key, 1), inputs.tokens
    scores = (inputs.q @ k.mT * WIDTH**-0.5).masked_fill_(~inputs.mask.table(t, t), -math.inf)
    return kvpress.ObservedAttentionPress(0.9).score(None, None, inputs.k, inputs.v, scores.softmax(-1), {})


def take_median(run: Callable[[], object], rounds: int) -> float:
    """The median of a few runs, in seconds."""
    return sorted(measure_seconds(run) for _ in range(rounds))[rounds // 2]


def make_inputs(t: int, heads: int = HEADS, seed: int = 0) -> AttentionInputs:
    """Random queries, keys and values, the prompt the first half."""
    generator = torch.Generator().manual_seed(seed)
    groups = min(heads, KEY_HEADS)
    q, k, v = (torch.randn(1, n, t, WIDTH, generator=generator) for n in (heads, groups, groups))
    return AttentionInputs(q=q, k=k, v=v, prompt=t // 2)


def audit(inputs: AttentionInputs, policies: Sequence[Policy]) -> RowMeasures:
    """Choose the keys of each policy and measure all rows."""
    found, _ = measure_layer(inputs, policies)
    return found


def measure_densely(inputs: AttentionInputs, policies: Sequence[Policy]) -> Tensor:
    """Recall (policy, h, t) from complete matrices, one head at a time."""
    t = torch.arange(inputs.tokens)
    masks = [one.choose_keys(inputs) for one in policies]
    weights = inputs.build_map()
    found = torch.empty(len(masks), inputs.q.shape[1], inputs.tokens)
    for head in range(inputs.q.shape[1]):
        dense = weights.select(heads=[head]).dense()[0, 0]
        for n, mask in enumerate(masks):
            found[n, head] = (dense * mask.select_heads([head]).block(t, t)[0, 0]).sum(-1)
    return found


def check() -> None:
    """That recall is that of the dense matrix, that errors are those of the kept keys, and that the oracle is a bound."""
    inputs = make_inputs(512)
    policies = [*POLICIES.values(), Oracle(256)]
    found = audit(inputs, policies)
    difference = (found.recall[:, 0] - measure_densely(inputs, policies)).abs().max()
    assert difference < 1e-5, f"recall is off by {difference:.1e}"
    text, t = replace(inputs, prompt=inputs.tokens), torch.arange(inputs.tokens)
    if has_kvpress():
        difference = (ObservedAttention(0.1).score_keys(text) - score_by_kvpress(text)).abs().max()
        assert difference < 1e-5, f"ObservedAttention is off kvpress's by {difference:.1e}"
    for n, policy in enumerate(policies):
        weights = inputs.build_map().dense() * policy.choose_keys(inputs).block(t, t)
        v = inputs.v.repeat_interleave(inputs.heads_per_key, 1)
        complete = inputs.build_map().dense() @ v
        error = (weights / weights.sum(-1, keepdim=True) @ v - complete).norm(dim=-1) / complete.norm(dim=-1)
        difference = (found.output_error[n] - error).abs().max()
        assert difference < 1e-4, f"the error of the output is off by {difference:.1e}"


def measure_memory(t: int, heads: int) -> float | None:
    """The peak of an audit above q, k and v, in MiB, in a fresh process."""
    code = f"from benchmarks import audit; print(audit.find_peak({t}, {heads}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = ran.stdout.split()[-1]
    return None if told == "None" else float(told)


def find_peak(t: int, heads: int) -> float | None:
    """The peak in this process; what is compiled is compiled before."""
    policies = [StreamingLLM(4, 252), SnapKV(256)]
    audit(make_inputs(512, heads), policies)
    inputs = make_inputs(t, heads)
    return measure_peak_megabytes(partial(audit, inputs, policies))
