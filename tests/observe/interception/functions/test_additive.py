"""The door of additive attention: its layer in any model, a decoder's steps in one map, whichever way they are taken."""

import pytest
import torch
from torch import Tensor, nn

import regard
from bounds import EXPONENTIAL, assert_within, bounds_from_scores, gamma
from models.translators import VOCABULARY, Weights, make_translator, pad_sentences, sentences
from observe.recording_checks import EQUAL, distance, record_and_compare
from regard import AdditiveAttention, AttentionMap, ConfigError, Padding, intervene
from regard.generate.translation_search import translate
from regard.mechanism.additive import additive_attention, attend_additive
from regard.observe import load, record

B, T, S, C, N, END = 3, 7, 11, 5, 13, 5
pytestmark = pytest.mark.usefixtures("in_float64")


def layer() -> AdditiveAttention:
    torch.manual_seed(0)
    return AdditiveAttention(C, C + 1, N)


def draw_inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, T, C), torch.randn(B, S, C + 1)


@pytest.mark.parametrize("batched", [True, False])
def test_the_layer_called_once_is_one_cross_map(batched):
    queries, keys = draw_inputs() if batched else [x[0] for x in draw_inputs()]
    mask = Padding([S, 4, 9]) if batched else regard.Prefix(6)
    recording, _ = record_and_compare(layer(), lambda m: m(queries, keys, mask=mask))
    expected = layer().steps(queries, keys, mask=mask).weights
    assert recording.layers("cross") == [""]
    assert distance(recording.map(0, kind="cross"), expected.unsqueeze(-3)) < EQUAL
    assert recording.map(0, kind="cross").planes.request.weight is not None


def test_queries_that_attend_to_one_another_are_self_attention():
    torch.manual_seed(0)
    model, x = AdditiveAttention(C, C, N), draw_inputs()[0]
    recording, _ = record_and_compare(model, lambda m: m(x))
    assert distance(recording.map(0), model.steps(x).weights.unsqueeze(-3)) < EQUAL


class Decoder(nn.Module):
    """An RNN that looks at the source before each word, in one forward or step by step, as tutorials write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.cell, self.way = AdditiveAttention(C, C + 1, N), nn.GRUCell(C + 1, C), way

    def forward(self, state: Tensor, keys: Tensor, steps: int = T) -> Tensor:
        projected, found = self.attention.project(keys), []
        for _ in range(steps):
            if self.way == "over":
                context = self.attention.attend_projected(state.unsqueeze(1), projected, keys, Padding([S, 4, 9][: len(keys)]))
            elif self.way == "forward":
                context = self.attention(state.unsqueeze(1), keys, mask=Padding([S, 4, 9][: len(keys)]))
            else:
                q = self.attention.W_query(state.unsqueeze(1)).unsqueeze(1)
                mask = Padding([S, 4, 9][: len(keys)])
                context = additive_attention(q, projected.unsqueeze(1), keys.unsqueeze(1), self.attention.weight, mask)[:, 0]
            state = self.cell(context[:, 0], state)
            found.append(state)
        return torch.stack(found, 1)


def queries_of(states: Tensor, first: Tensor) -> Tensor:
    """The queries of a decoder's steps: each is the state before."""
    return torch.cat((first.unsqueeze(1), states[:, :-1]), 1)


@pytest.mark.parametrize("way", ["over", "forward", "function"])
def test_the_steps_of_a_decoder_in_one_forward_are_one_map(way):
    model, (start, keys) = Decoder(way), draw_inputs()
    start = start[:, 0]
    recording, states = record_and_compare(model, lambda m: m(start, keys))
    expected = model.attention.steps(queries_of(states, start), keys, mask=Padding([S, 4, 9])).weights
    assert len(recording.layers("cross")) == 1
    assert recording.layers("cross") == ["attention" if way != "function" else ""]
    assert distance(recording.map(0, kind="cross"), expected.unsqueeze(1)) < EQUAL
    assert len(recording.calls) == T
    assert recording.calls[3].map.shape == (B, 1, 1, S)
    assert len(recording.runs) == 1


@pytest.mark.parametrize("way", ["over", "forward", "function"])
def test_the_steps_of_a_decoder_in_many_forwards_are_one_map(way):
    model, (start, keys) = Decoder(way), draw_inputs()
    start = start[:, 0]

    def run(m: nn.Module) -> Tensor:
        state, found = start, []
        for _ in range(T):
            state = m(state, keys, 1)[:, 0]
            found.append(state)
        return torch.stack(found, 1)

    recording, states = record_and_compare(model, run)
    expected = model.attention.steps(queries_of(states, start), keys, mask=Padding([S, 4, 9])).weights
    assert len(recording.runs) == 1
    assert distance(recording.map(0, kind="cross"), expected.unsqueeze(1)) < EQUAL
    assert [call.step for call in recording.calls] == list(range(T))


def test_the_same_sentence_again_and_another_one_are_runs_of_their_own():
    model, (start, keys) = Decoder("over"), draw_inputs()
    with record(model) as recording:
        for source in (keys, keys, keys + 1):
            model(start[:, 0], source)
    assert len(recording.runs) == 3
    first, second, third = (run.map(0, kind="cross") for run in recording.runs)
    assert torch.equal(first.dense(), second.dense())
    assert not torch.allclose(first.dense(), third.dense())
    assert first.shape == (B, 1, T, S)


@pytest.mark.parametrize("whole", [True, False])
def test_rows_that_move_are_followed_by_their_keys(whole):
    model, (start, keys) = Decoder("over"), draw_inputs()
    moves = [[0, 1, 2], [2, 0, 1], [1, 2], [1, 0]]

    class Search(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = model

        def forward(self) -> Tensor:
            source, projected, state, found = keys, model.attention.project(keys), start[:, 0], []
            for rows in moves:
                source, projected, state, found = source[rows], projected[rows], state[rows], [one[rows] for one in found]
                found.append(state)
                state = model.cell(model.attention.attend_projected(state.unsqueeze(1), projected, source)[:, 0], state)
            return torch.stack(found, 1)

    search = Search()
    with record(search) as recording, torch.no_grad():
        states = search() if whole else search.forward()
    assert len(recording.runs) == 1
    source = keys[moves[0]][moves[1]][moves[2]][moves[3]]
    expected = model.attention.steps(states, source).weights
    assert distance(recording.map(0, kind="cross"), expected.unsqueeze(1)) < EQUAL


def test_a_search_that_nobody_reports_is_detected(recwarn):
    model, (start, keys) = Decoder("over"), draw_inputs()
    state, twins = start[:1, :2].flatten(0, 1), keys[:1].expand(2, -1, -1)

    def search(moved: bool):
        with torch.no_grad(), record(model) as recording:
            projected, states = model.attention.project(keys[:1]).expand(2, -1, -1), state  # equal to the bit
            for _ in range(3):
                projected = projected[[1, 0]] if moved else projected
                context = model.attention.attend_projected(states[[1, 0]].unsqueeze(1), projected, twins)
                states = model.cell(context[:, 0], states)
        assert recording.map(0, kind="cross").shape == (2, 1, 3, S)
        return [one.reason for one in recording.missed]

    assert not search(moved=False)
    assert "have been swapped" in search(moved=True)[0]
    assert len(recwarn) == 1


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, N))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return additive_attention(q, k, k, self.weight)


def test_what_autocast_leaves_as_it_is_stays_as_it_is():
    torch.manual_seed(0)
    model, q, k = Plain().float(), torch.randn(B, 1, T, N).float(), torch.randn(B, 1, S, N).float()
    with torch.autocast("cpu", torch.bfloat16):
        recording, _ = record_and_compare(model, lambda m: m(q, k))
    m, weight = recording.map(0, kind="cross"), model.weight.detach()
    assert m.planes.request.q.dtype == torch.float32
    assert_additive(m, attend_additive(*(x.double() for x in (q, k, k, weight))).weights, q, k, weight)


def assert_additive(
    found: AttentionMap, weights: Tensor, q: Tensor, k: Tensor, weight: Tensor, kept: torch.dtype = torch.float32
) -> None:
    """Fail unless a map computed in float32, of q and k that were kept in a dtype, lies within its bound of the weights.

    A score is a sum of d products; each tanh has the roundings of an exponential, and q + k one, which it does not enlarge.
    """
    q, k, weight = (x.double().abs() for x in (q.unsqueeze(-2), k.unsqueeze(-3), weight))
    off = gamma(torch.float32, len(weight) + EXPONENTIAL + 2) * ((q + k).tanh() @ weight)
    if kept != torch.float32:
        off = off + gamma(kept, 1) * ((q + k) @ weight)
    assert_within(found.dense(), weights, bounds_from_scores(torch.float32, off, weights, k[..., 0, :, :]).weights)


def test_two_sentences_in_one_forward_are_two_visits():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Decoder("over")

        def forward(self, state: Tensor, keys: Tensor) -> Tensor:
            return self.decoder(state, keys) + self.decoder(state, keys.flip(1))

    start, keys = draw_inputs()
    recording, _ = record_and_compare(Twice(), lambda m: m(start[:, 0], keys))
    assert [recording.map(n, kind="cross").shape for n in range(2)] == [(B, 1, T, S)] * 2
    assert not torch.equal(recording.map(0, kind="cross").dense(), recording.map(1, kind="cross").dense())


@pytest.mark.parametrize("kind", ["additive", "additive lstm of two layers"])
def test_a_translator_by_its_teacher_is_one_map_of_target_and_source(kind):
    model = make_translator(kind)
    (sources, lengths), targets = pad_sentences(sentences(4, 9, 6)), torch.randint(0, VOCABULARY, (3, 8))
    with Weights() as seen:
        model(sources, lengths, targets)
    recording, _ = record_and_compare(model, lambda m: m(sources, lengths, targets))
    found = recording.map(0, kind="cross")
    assert recording.layers("cross") == ["attention"]
    assert found.shape == (3, 1, 8, 9)
    assert distance(found, torch.cat(seen.found, -2)) < 1e-12
    assert distance(recording.map("attention", 0, kind="cross").select(batch=0), torch.cat(seen.found, -2)[:1]) < 1e-12
    assert float(found.mass(slice(6, None))[2].max()) == 0  # padding


def test_training_is_the_same_to_the_bit():
    model = make_translator("additive", dtype=torch.float32, dropout=0.2).train()
    (sources, lengths), targets = pad_sentences(sentences(4, 9, 6)), torch.randint(0, VOCABULARY, (3, 8))

    def step(m: nn.Module) -> object:
        m.zero_grad()
        loss = m(sources, lengths, targets).square().mean()
        loss.backward()
        return loss, [p.grad.clone() for p in m.parameters()]

    recording, _ = record_and_compare(model, step)
    assert recording.map(0, kind="cross").shape == (3, 1, 8, 9)


def compute_weights(model, tokens, source):
    """The weights (t, s) of a sentence read again with its translation, which decides what was looked at on the way."""
    with Weights() as seen:
        model(torch.tensor([source]), [len(source)], torch.tensor([[END, *tokens[:-1]]]))
    return torch.cat([x[0, 0] for x in seen.found])


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3, 4])
def test_a_translation_keeps_the_history_of_the_beams_that_survived(beams):
    checked = 0
    for seed in range(4):
        model, rows = make_translator("additive", seed), sentences(4, 9, 6, seed=seed)
        with record(model) as recording:
            found = translate(model, rows, beams=beams, end=END, longest=9)
        assert not recording.missed
        assert len(recording.runs) == 1
        m = recording.map(0, kind="cross")
        assert m.shape[0] == 3 * beams
        for place, number in enumerate(sorted(range(3), key=lambda n: len(rows[n]))):
            tokens, source = found[number].tokens, rows[number]
            if beams == 1 or len(tokens) == m.shape[2]:  # of a search, what went on to its last step
                ours = m[place * beams : (place + 1) * beams, 0, : len(tokens), : len(source)]
                assert float((ours - compute_weights(model, tokens, source)).abs().amax((1, 2)).min()) < 1e-10
                checked += 1
    assert checked >= 4


def test_histories_of_all_rows_are_those_of_a_search_by_hand():
    model, (sources, lengths) = make_translator("additive"), pad_sentences(sentences(6))
    tokens = torch.tensor([[END, END, END], [7, 8, 9], [11, 12, 13], [14, 15, 16], [17, 18, 19]])
    parents = [torch.tensor([0, 0, 0]), torch.tensor([2, 0, 0]), torch.tensor([1, 1, 2]), torch.tensor([2, 0, 1])]
    with record(model) as recording, torch.no_grad():
        state = model.begin(model.encode(sources, lengths))
        _, state = model.read(tokens[0, :1], state)
        history = [[END]] * 1
        for step, rows in zip(tokens[1:], parents, strict=True):
            state = state.select_rows(rows)
            _, state = model.read(step, state)
            history = [[*history[parent], int(token)] for parent, token in zip(rows, step, strict=True)]
    m = recording.map(0, kind="cross")
    assert m.shape == (3, 1, 5, 6)
    for row, read in enumerate(history):
        torch.testing.assert_close(m[row, 0], compute_weights(model, [*read[1:], 0], sources[0].tolist()), rtol=0, atol=1e-10)


def test_a_saved_recording_of_additive_attention_is_the_same_to_the_bit(tmp_path):
    model, rows = make_translator("additive", dtype=torch.float32), sentences(4, 9)
    with record(model, keep="values") as recording:
        translate(model, rows, beams=2, end=END, longest=6)
    recording.tokens = {"rows": [f"t{n}" for n in range(6)], "columns": [f"s{n}" for n in range(9)]}
    recording.save(tmp_path / "one.reg")
    found = load(tmp_path / "one.reg")
    one, other = (x.map(0, kind="cross") for x in (recording, found))
    given = [tuple(getattr(x.planes.request, name) for name in ("q", "k", "weight")) for x in (one, other)]
    assert all(map(torch.equal, *given))
    assert_additive(other, one.dense(), *given[0])  # a product may round by where in memory it lies
    assert torch.equal(recording.values(0, "cross"), found.values(0, "cross"))
    assert found.words(0, "cross") == recording.words(0, "cross") == (recording.tokens.rows, recording.tokens.columns)


@pytest.mark.parametrize("keep", ["bfloat16", None])
def test_halves_and_autocast_keep_what_the_attention_saw(keep):
    model = make_translator("additive", dtype=torch.float32)
    sources, lengths = pad_sentences(sentences(4, 9))
    targets = torch.randint(0, VOCABULARY, (2, 5))
    with torch.autocast("cpu", torch.bfloat16):
        with Weights() as seen:
            model(sources, lengths, targets)
        recording, _ = record_and_compare(model, lambda m: m(sources, lengths, targets), keep=keep)
        whole, _ = record_and_compare(model, lambda m: m(sources, lengths, targets))
    m = recording.map(0, kind="cross")
    given = (getattr(whole.map(0, kind="cross").planes.request, name) for name in ("q", "k", "weight"))
    assert_additive(m, torch.cat(seen.found, -2), *given, kept=torch.bfloat16 if keep else torch.float32)


def test_what_a_table_of_heads_and_a_rollout_say_of_it():
    model = make_translator("additive")
    with record(model) as recording:
        model(*pad_sentences(sentences(4, 9)), torch.randint(0, VOCABULARY, (2, 5)))
    assert "kind='cross'" in str(regard.heads(recording))
    recording.tokens = {"rows": list("abcde"), "columns": list("fgh,ijklm")}
    (row,) = regard.heads(recording, kind="cross")
    m = recording.map(0, kind="cross")
    sees = torch.tensor([4, 9])
    assert row.scores["punctuation"] == pytest.approx(float(m[..., 3].mean()))
    assert row.scores["first token"] == pytest.approx(float(m[..., 0].mean()))
    assert row.scores["breadth"] == pytest.approx(float((m.entropy()[:, 0].exp() / sees.unsqueeze(-1)).mean()))
    with pytest.raises(ConfigError, match="belong to another text"):
        regard.rollout(recording, kind="cross")
    with pytest.raises(ConfigError, match="no layer of kind 'self'"):
        regard.rollout(recording)
    assert regard.compare(recording, recording, kind="cross").heads[0].mean == 0


def test_an_intervention_changes_additive_attention_too():
    model = Decoder("over")
    start, keys = draw_inputs()
    plain = model(start[:, 0], keys)
    with intervene(model, regard.CutEdges(layer="attention", keys=slice(0, 2), kind="cross")), record(model) as recording:
        changed = model(start[:, 0], keys)
    assert not torch.equal(changed, plain)
    m = recording.map(0, kind="cross")
    assert float(m.mass(slice(0, 2)).max()) == 0
    contexts, states = (m @ keys.unsqueeze(1))[:, 0], torch.cat((start[:, :1], changed), 1)
    for step in range(T):
        torch.testing.assert_close(changed[:, step], model.cell(contexts[:, step], states[:, step]), rtol=0, atol=EQUAL)
    with intervene(model, regard.Temperature(layer="attention", t=2.0, kind="cross")), record(model) as recording:
        warmer = model(start[:, 0], keys)
    q = model.attention.W_query(queries_of(warmer, start[:, 0])).unsqueeze(1)
    k = model.attention.project(keys).unsqueeze(1)
    expected = attend_additive(q, k, k, model.attention.weight / 2, Padding([S, 4, 9])).weights
    assert distance(recording.map(0, kind="cross"), expected) < EQUAL


def test_other_models_and_threads_are_not_recorded_and_nothing_stays_in_the_way():
    other, model, (start, keys) = Decoder("over"), Decoder("over"), draw_inputs()
    before = AdditiveAttention.attend_projected
    with record(model) as recording:
        other(start[:, 0], keys)
        other.attention.attend_projected(start[:, :1], other.attention.project(keys), keys)
    assert not recording.calls
    assert AdditiveAttention.attend_projected is before
