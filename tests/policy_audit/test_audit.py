"""What an audit measures is what a dense computation in float64 gives, for every row."""

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from bounds import gamma, unit_roundoff
from policy_audit.small_models import HEADS, LAYERS, PROMPT, TOKENS, draw_tokens, make_model, record, record_layer
from regard import Causal, ConfigError, DataError, Given, MissingNameError, OutOfRangeError, Window
from regard.policies import (
    H2O,
    TOVA,
    BlockSparse,
    DuoAttention,
    ExpectedAttention,
    Knorm,
    Lifetime,
    ObservedAttention,
    Oracle,
    Policy,
    Quantised,
    Quest,
    SnapKV,
    StreamingLLM,
    VerticalSlash,
)

B, G, R, D, E = 1, 2, 3, 7, 5


@dataclass(frozen=True)
class KeepAtRandom(Policy):
    """Keep each key for each query with a probability, and always its own."""

    share: float
    seed: int

    def choose_keys(self, inputs):
        generator = torch.Generator().manual_seed(self.seed)
        b, h, t = *inputs.q.shape[:2], inputs.tokens
        table = torch.rand(b, h, t, t, generator=generator) < self.share
        return Given(table | torch.eye(t, dtype=torch.bool))


@dataclass(frozen=True)
class Drop(Policy):
    """Drop one key from every later query."""

    key: int

    def choose_keys(self, inputs):
        keys = torch.arange(inputs.tokens)
        return Given((keys != self.key) | torch.eye(inputs.tokens, dtype=torch.bool))


def draw_layer(tokens, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, G * R, tokens, D), (B, G, tokens, D), (B, G, tokens, E)
    return [torch.randn(shape, generator=generator, dtype=dtype) * 2 for shape in shapes]


def measure_densely(q, k, v, kept, scale=None, sinks=None, softcap=None, window=None):
    """Recall, KL, output error, number of keys, variation, dropped distance and its condition (h, q), densely in float64."""
    q, k, v = q.double()[0], k.double()[0].repeat_interleave(R, 0), v.double()[0].repeat_interleave(R, 0)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    t = scores.shape[-1]
    seen = torch.ones(t, t, dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(-window)
    kept = kept & seen
    extra = torch.full((len(q), t, 1), -torch.inf, dtype=torch.float64)
    extra = extra if sinks is None else sinks.double().view(-1, 1, 1).expand_as(extra)
    complete, partial = (torch.cat([scores.masked_fill(~mask, -torch.inf), extra], -1).softmax(-1) for mask in (seen, kept))
    shares = torch.cat([kept.expand(len(q), t, t), torch.ones(len(q), t, 1, dtype=torch.bool)], -1)
    recall = (complete * shares).sum(-1)
    kl = torch.where(partial > 0, partial * (partial / complete).log(), 0).sum(-1)
    variation = (partial - complete).abs().sum(-1) / 2
    o, o_kept = complete[..., :-1] @ v, partial[..., :-1] @ v
    back = torch.arange(t).unsqueeze(-1) - torch.arange(t)
    dropped = complete[..., :-1] * ~kept
    share, far, near = dropped.sum(-1), (complete[..., :-1] * back).sum(-1), (partial[..., :-1] * back).sum(-1)
    distance = (dropped * back).sum(-1) / share.masked_fill(share <= 1e-4, torch.nan)
    condition = (far + 2 * near + distance) / share  # of (far - (1 - share) near) / share, in errors of the weights
    return (
        recall,
        kl,
        (o_kept - o).norm(dim=-1) / o.norm(dim=-1),
        kept.sum(-1).expand(len(q), t),
        variation,
        distance,
        condition,
    )


def compare(found, expected, atol=1e-10):
    recall, kl, error, kept, variation, distance, _ = expected
    for ours, theirs in (
        (found.recall, recall),
        (found.kl, kl),
        (found.output_error, error),
        (1 - found.recall, variation),
    ):
        torch.testing.assert_close(ours[0, 0, 0], theirs, rtol=0, atol=atol)
    torch.testing.assert_close(found.dropped_distance[0, 0, 0], distance, rtol=0, atol=1e-6, equal_nan=True)
    assert torch.equal(found.kept[0, 0, 0].long(), kept)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([0.02, 0.3, 0.9]), st.integers(0, 2**20), st.sampled_from(["plain", "capped", "sinks", "window"]))
def test_every_row_of_a_random_policy_is_that_of_the_dense_computation(share, seed, kind):
    t = 512
    q, k, v = draw_layer(t, seed)
    policy = KeepAtRandom(share, seed)
    model = {
        "plain": {},
        "capped": {"softcap": 3.0, "scale": 0.7},
        "sinks": {"sinks": torch.linspace(-2, 2, G * R, dtype=torch.float64)},
        "window": {"mask": Causal() & Window(left=100)},
    }[kind]
    recording = record_layer(q, k, v, **model)
    found = regard.audit(recording, policy, prompt=t)  # a table of each query may look ahead; nothing comes after this prompt
    kept = policy.choose_keys(found.read_inputs(0)).table(t, t)
    other = {name: value for name, value in model.items() if name != "mask"}
    compare(found, measure_densely(q, k, v, kept, window=100 if kind == "window" else None, **other))


DRAWN_LAYERS = st.tuples(
    st.one_of(
        st.builds(StreamingLLM, st.integers(0, 5), st.integers(1, 90)),
        st.builds(H2O, st.integers(2, 200)),
        st.builds(TOVA, st.floats(0.01, 1)),
        st.builds(SnapKV, st.integers(16, 200), st.just(16), st.sampled_from([1, 5])),
        st.builds(Knorm, st.floats(0.01, 1)),
        st.builds(ExpectedAttention, st.integers(1, 100)),
        st.builds(Oracle, st.integers(1, 200)),
        st.builds(Quest, st.integers(16, 200), st.sampled_from([1, 5, 16])),
        st.builds(BlockSparse, st.integers(32, 200), st.sampled_from([7, 32])),
        st.builds(VerticalSlash, st.integers(1, 60), st.integers(1, 60), st.just(9)),
    ),
    st.integers(40, 512),
    st.integers(0, 2**20),
    st.sampled_from(["plain", "capped", "sinks", "window"]),
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(DRAWN_LAYERS)
def test_every_row_of_a_shipped_policy_at_random_is_that_of_the_dense_computation(drawn):
    policy, prompt, seed, kind = drawn
    q, k, v = draw_layer(512, seed)
    model = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in MODELS[kind].items()}
    found = regard.audit(record_layer(q, k, v, **model), policy, prompt=prompt)
    kept = policy.choose_keys(found.read_inputs(0)).block(torch.arange(512), torch.arange(512))[0]
    other = {name: value for name, value in model.items() if name != "mask"}
    compare(found, measure_densely(q, k, v, kept, window=100 if kind == "window" else None, **other))


MODELS = {
    "plain": {},
    "capped": {"softcap": 3.0, "scale": 0.7},
    "sinks": {"sinks": torch.linspace(-2, 2, G * R)},
    "window": {"mask": Causal() & Window(left=100)},
}
CACHES = [StreamingLLM(4, 60), H2O(40), TOVA(40), SnapKV(80), Knorm(40), DuoAttention(((0, 1),), 2, 30)]
CHOSEN = [Oracle(30), Quest(64), BlockSparse(96, 16), VerticalSlash(20, 30, 16)]


def refuse_plain_blocks(*arguments):
    raise AssertionError("a shipped policy is measured by plain blocks, although numba is there.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "kind", "prompt"),
    [
        *((policy, "plain", 300) for policy in (*CACHES, ObservedAttention(0.1))),
        *((policy, kind, prompt) for policy in CHOSEN for kind, prompt in (("plain", 300), ("sinks", 301), ("window", 400))),
        (Quest(64, 8), "capped", 256),
        *((policy, kind, prompt) for policy in CACHES for kind, prompt in (("capped", 256), ("sinks", 301), ("window", 511))),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_numba", [True, False])
def test_shipped_policies_in_float32_are_those_of_float64_within_the_bound(policy, kind, prompt, has_numba, monkeypatch):
    t, model = 512, MODELS[kind]
    q, k, v = draw_layer(t, 3, torch.float32)
    if not has_numba:
        monkeypatch.setattr("regard.compiled.processor.has_numba", lambda: False)
    else:
        monkeypatch.setattr("regard.policy_audit.measure.measure_block", refuse_plain_blocks)
    found = regard.audit(record_layer(q, k, v, **model), policy, prompt=prompt)
    kept = policy.choose_keys(found.read_inputs(0)).table(t, t)
    other = {name: value for name, value in model.items() if name != "mask"}
    recall, kl, error, keys, _, distance, condition = measure_densely(
        q, k, v, kept if kept.dim() < 4 else kept[0], window=100 if kind == "window" else None, **other
    )
    assert torch.equal(found.kept[0, 0, 0].long(), keys)
    scores = float((q.abs() @ k.abs().repeat_interleave(R, 1).mT).max()) * model.get("scale", D**-0.5)
    rounding = 4 * (gamma(torch.float32, D + 4) * scores + gamma(torch.float32, t) + 8 * unit_roundoff(torch.float32))
    torch.testing.assert_close(found.kl[0, 0, 0].double(), kl, rtol=rounding, atol=rounding)
    ours = found.dropped_distance[0, 0, 0].double()
    is_certain = (recall - (1 - 1e-4)).abs() > 1e-6  # on which side of the limit the share of the weight is
    assert torch.equal(ours.isnan()[is_certain], distance.isnan()[is_certain])
    assert ((ours - distance).abs() <= rounding * condition)[is_certain & ~distance.isnan()].all()
    torch.testing.assert_close(found.recall[0, 0, 0].double(), recall, rtol=rounding, atol=0)
    spread = v.norm(dim=-1).max() / (found.read_inputs(0).build_map() @ v).norm(dim=-1)[0]
    assert ((found.output_error[0, 0, 0].double() - error).abs() <= rounding * (1 + error) * spread * 2).all()


def test_what_rounding_changes_is_that_of_the_dense_computation():
    t, prompt, policy = 131, 71, Quantised(3, 8)
    q, k, v = draw_layer(t, 7)
    found = regard.audit(record_layer(q, k, v), policy, prompt=prompt)
    k_rounded, v_rounded = policy.change_cache(found.read_inputs(0))
    rows = slice(prompt, None)
    seen = torch.ones(t, t, dtype=torch.bool).tril()
    p, other = (
        (q @ x.repeat_interleave(R, 1).mT * D**-0.5).double().masked_fill(~seen, -torch.inf).softmax(-1)[0, :, rows]
        for x in (k, k_rounded)
    )
    o, changed = (x @ y.double().repeat_interleave(R, 1)[0] for x, y in ((p, v), (other, v_rounded)))
    for ours, theirs in (
        (found.recall, torch.minimum(p, other).sum(-1)),
        (found.kl, torch.where(other > 0, other * (other / p).log(), 0).sum(-1)),
        (found.output_error, (changed - o).norm(dim=-1) / o.norm(dim=-1)),
    ):
        torch.testing.assert_close(ours[0, 0, 0, :, rows], theirs, rtol=0, atol=1e-10)
        assert (ours[..., :prompt] == (1 if ours is found.recall else 0)).all()
    assert (found.kept[0, 0, 0, 0] == torch.arange(1, t + 1)).all()


def test_every_layer_head_and_row_of_a_model_is_measured_for_each_policy():
    model, tokens = make_model(), draw_tokens()
    recording = record(model, tokens)
    policies = [Knorm(5), StreamingLLM(1, 6), Oracle(4)]
    found = regard.audit(recording, policies, prompt=PROMPT)
    shape = (3, LAYERS, 2, HEADS, TOKENS)
    assert [x.shape for x in (found.recall, found.kl, found.output_error, found.kept)] == [shape] * 4
    for n, policy in enumerate(policies):
        for layer in range(LAYERS):
            one = regard.audit(recording, policy, prompt=PROMPT, layers=[layer])
            assert torch.equal(one.recall[0, 0], found.recall[n, layer])
    assert (found.recall[0, ..., :PROMPT] == 1).all()
    assert (found.kept[0, ..., PROMPT:] == 5 + torch.arange(1, TOKENS - PROMPT + 1)).all()
    assert (found.output_error[0, ..., :PROMPT] == 0).all()


def test_the_prompt_of_a_recorded_generation_is_its_first_forward():
    model = make_model()
    with regard.record(model, keep="values") as recording:
        list(model.generate(draw_tokens(1, 11), 6, temperature=0))
    assert regard.audit(recording, Knorm(3)).prompt == 11
    assert regard.audit(record(model, draw_tokens()), Knorm(3)).prompt == TOKENS // 2


def test_the_table_fits_and_the_plain_values_are_json():
    found = regard.audit(record(make_model(), draw_tokens()), [Knorm(3), SnapKV(0.5, window=2)], prompt=PROMPT)
    for width in (80, 40, 24):
        lines = found.format_lines(width)
        assert max(map(len, lines)) <= width
        words = set(" ".join(lines).split())
        for row in found.summarize():
            assert {f"{x:.4f}" for x in (row.recall, row.low, row.least, row.kl, row.error)} <= words
    rows = json.loads(json.dumps(found.to_dicts(), allow_nan=False))
    assert [(row["policy"], row["part"]) for row in rows][:2] == [
        ("Knorm(budget=3)", "generated"),
        (found.labels[1], "generated"),
    ]
    assert rows[0]["recall"] == pytest.approx(float(found.recall[0, ..., PROMPT:].mean()))
    assert rows[0]["least"] == float(found.recall[0, ..., PROMPT:].min())
    assert rows[2]["recall"] == 1
    assert str(found).startswith(f"{TOKENS - PROMPT} queries after a prompt of {PROMPT}, in 2 layers of 3 heads\npolicy")


@dataclass(frozen=True)
class KeepNothing(Policy):
    """Keep no key, which leaves a row without a distribution."""

    def choose_keys(self, inputs):
        return ~regard.Everything()


@dataclass(frozen=True)
class KeepNothingLater(Policy):
    """Keep the prompt for its own queries alone, and no key after it: a cache without slots."""

    def choose_keys(self, inputs):
        keys = torch.arange(inputs.tokens)
        return Lifetime(torch.where(keys < inputs.prompt, inputs.prompt, 0).view(1, 1, -1))


@dataclass(frozen=True)
class LookAhead(Policy):
    """Keep the keys that the last queries attend to."""

    def choose_keys(self, inputs):
        last = inputs.build_map(inputs.tokens - 3)[...].mean(2)
        return Given((last > last.median(-1, keepdim=True).values).unsqueeze(2)) | Given(torch.eye(inputs.tokens).bool())


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"policies": KeepNothing()}, ConfigError, "keeps no key for query 0 in head 0"),
        ({"policies": LookAhead()}, ConfigError, r"LookAhead\(\) looks ahead"),
        ({"policies": []}, ConfigError, "policies is empty"),
        ({"policies": [0.1]}, ConfigError, "a policy must be a Policy"),
        ({"policies": 0.1}, ConfigError, "a list or a tuple"),
        ({"policies": "h3o"}, MissingNameError, "there is no policy 'h3o'; the policies are streamingllm, h2o, "),
        ({"policies": [Knorm(2), "h2o:3"]}, ConfigError, "'3' are no such arguments"),
        ({"policies": KeepNothingLater()}, ConfigError, "keeps no key for query 23 in head 0"),
        ({"prompt": 0}, ConfigError, "prompt"),
        ({"prompt": TOKENS + 1}, ConfigError, "prompt"),
        ({"layers": [LAYERS]}, OutOfRangeError, "layers has 0 to 1"),
        ({"layers": []}, ConfigError, "no layers to audit"),
        ({"recording": "file"}, ConfigError, "recording must be a Recording"),
    ],
)
def test_bad_input_gets_a_sentence(change, error, says):
    arguments = {"recording": record(make_model(), draw_tokens(1)), "policies": Knorm(3), "prompt": PROMPT} | change
    with pytest.raises(error, match=says):
        regard.audit(**arguments)


def test_a_recording_without_values_is_refused():
    with pytest.raises(ConfigError, match=r"values of .* were not kept.*keep='values'"):
        regard.audit(record(make_model(), draw_tokens(), keep=None), Knorm(3))


def test_a_recording_of_some_heads_is_refused():
    model = make_model()
    with torch.no_grad(), regard.record(model, keep="values", heads=[0, 2]) as recording:
        model(draw_tokens())
    with pytest.raises(ConfigError, match=r"all heads of a layer.*only \(0, 2\) were recorded"):
        regard.audit(recording, H2O(3))


@pytest.mark.parametrize("broken", ["queries", "keys", "values"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_named_as_what_cannot_be_compared(broken, number):
    layer = list(draw_layer(9, 0))
    layer[["queries", "keys", "values"].index(broken)][0, 0, 4] = number
    with pytest.raises(DataError, match=f"the {broken} of .* are not all finite"):
        regard.audit(record_layer(*layer), Knorm(3), prompt=4)
