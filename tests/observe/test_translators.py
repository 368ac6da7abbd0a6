"""The Transformer of 2017 under record: its three kinds of attention, by its teacher at once, and word by word with beams."""

import pytest
import torch

import regard
from models.translators import VOCABULARY, Weights, make_translator, pad_sentences, sentences
from observe.recording_checks import distance, record_and_compare
from regard import ConfigError, intervene
from regard.generate.translation_search import translate
from regard.observe import load, record

END, LAYERS = 5, 2
KINDS = ["transformer", "transformer, norm first"]


def compute_weights(model, rows, targets, layers=LAYERS):
    """The weights of encoder, decoder and cross attention of each layer, (layers, b, h, q, k) each."""
    with Weights() as seen:
        model(*pad_sentences(rows), torch.tensor(targets))
    return torch.stack(seen.found[:layers]), torch.stack(seen.found[layers::2]), torch.stack(seen.found[layers + 1 :: 2])


ASKED = [("self", "encoder"), ("self", "decoder"), ("cross", "decoder")]


@pytest.mark.parametrize("kind", KINDS)
def test_by_its_teacher_all_three_are_maps(kind):
    model, rows, targets = make_translator(kind), sentences(4, 9, 6), torch.randint(0, VOCABULARY, (3, 7)).tolist()
    recording, _ = record_and_compare(model, lambda m: m(*pad_sentences(rows), torch.tensor(targets)))
    for (one, part), expected in zip(ASKED, compute_weights(model, rows, targets), strict=True):
        assert len(recording.layers(one, part)) == LAYERS
        for layer in range(LAYERS):
            assert distance(recording.map(layer, kind=one, part=part), expected[layer]) < 1e-12
    assert recording.layers() == ["decoder.0.attention", "decoder.1.attention"]
    assert recording.layers("cross") == ["decoder.0.cross", "decoder.1.cross"]
    assert distance(recording.map("encoder.1.attention", 2), compute_weights(model, rows, targets)[0][1][:, 2:]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_the_same_to_the_bit(dtype):
    model = make_translator("transformer", dtype=dtype, dropout=0.2).train()

    def step(m):
        m.zero_grad()
        loss = m(*pad_sentences(sentences(4, 9)), torch.tensor([[END, 7, 8], [END, 9, 10]])).square().mean()
        loss.backward()
        return loss, [p.grad.clone() for p in m.parameters()]

    recording, _ = record_and_compare(model, step)
    assert recording.map(1, kind="cross").shape == (2, 3, 3, 9)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("kind", KINDS)
def test_histories_of_all_rows_are_those_of_a_search_by_hand(kind, layers):
    model, rows = make_translator(kind, layers=layers), sentences(6, 4)
    tokens = torch.tensor([[END] * 6, [7, 8, 9, 7, 8, 9], [11, 12, 13, 11, 11, 12], [14, 15, 16, 14, 16, 14]])
    parents = [
        [0, 0, 0, 1, 1, 1],
        [2, 0, 0, 4, 5, 5],
        [1, 1, 2, 5, 4, 4],
    ]  # of two rows with one last token
    with record(model) as recording, torch.no_grad():
        state = model.begin(model.encode(*pad_sentences(rows)))
        _, state = model.read(tokens[0, :2], state)
        history = [[END], [END]]
        for step, moved in zip(tokens[1:], parents, strict=True):
            state = state.select_rows(torch.tensor(moved))
            _, state = model.read(step, state)
            history = [[*history[parent], int(token)] for parent, token in zip(moved, step, strict=True)]
    assert not recording.missed
    assert len(recording.runs) == 1
    assert recording.map(layers - 1, part="encoder").shape == (2, 3, 6, 6)
    for row, read in enumerate(history):
        source = rows[row // 3]
        expected = compute_weights(model, [source], [read], layers)
        for (one, part), weights in list(zip(ASKED, expected, strict=True))[1:]:
            for layer in range(layers):
                ours = recording.map(layer, kind=one, part=part)[row]
                torch.testing.assert_close(ours[..., : weights.shape[-1]], weights[layer][0], rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_translation_keeps_what_was_looked_at_on_the_way(kind, beams):
    checked = 0
    for seed in range(4):
        model, rows = make_translator(kind, seed), sentences(4, 9, 6, seed=seed)
        with record(model) as recording:
            found = translate(model, rows, beams=beams, end=END, longest=9)
        assert not recording.missed
        assert len(recording.runs) == 1
        m = recording.map(1, kind="cross")
        own = recording.map(1)
        assert own.shape[2] == m.shape[2] == own.shape[3]
        for place, number in enumerate(sorted(range(3), key=lambda n: len(rows[n]))):
            tokens, source = found[number].tokens, rows[number]
            if beams == 1 or len(tokens) == m.shape[2]:
                _, decoder, cross = compute_weights(model, [source], [[END, *tokens[:-1]]])
                here, n = slice(place * beams, (place + 1) * beams), len(tokens)
                ours = m[here, :, :n, : len(source)]
                assert float((ours - cross[1]).abs().amax((1, 2, 3)).min()) < 1e-10
                assert float((own[here, :, :n, :n] - decoder[1]).abs().amax((1, 2, 3)).min()) < 1e-10
                checked += 1
    assert checked >= 4


def test_translations_one_after_the_other_are_runs_of_their_own(tmp_path):
    model = make_translator("transformer")
    with record(model) as recording:
        for lengths in ((4, 9), (6,), (6,)):
            translate(model, sentences(*lengths), beams=2, end=END, longest=5)
    assert len(recording.runs) == 3
    assert recording.runs[0].map(0, part="encoder").shape[0] == 2
    assert torch.equal(recording.runs[1].map(0, kind="cross").dense(), recording.runs[2].map(0, kind="cross").dense())
    recording.save(tmp_path / "one.reg")
    found = load(tmp_path / "one.reg")
    for ours, theirs in zip(recording.runs, found.runs, strict=True):
        for one, part in ASKED:
            a, b = (x.map(1, kind=one, part=part).planes.request for x in (ours, theirs))
            assert torch.equal(a.q, b.q)
            assert torch.equal(a.k, b.k)
            assert distance(ours.map(1, kind=one, part=part), theirs.map(1, kind=one, part=part).dense()) < 1e-12


def test_words_go_to_the_axes_that_they_are_of():
    model = make_translator("transformer")
    source, target = list("the,cat"), list("lechat.")[:5]
    with record(model) as recording:
        model(*pad_sentences(sentences(7)), torch.tensor([[END, 7, 8, 9, 10]]))
    recording.tokens = {"rows": target, "columns": source}
    assert recording.words(0, "cross") == (target, source)
    assert recording.words(0, part="encoder") == (source, source)
    assert recording.words(1, part="decoder") == recording.words(0) == (target, target)
    table = regard.heads(recording, kind="cross")
    assert len(table) == LAYERS * 3
    cross = recording.map(1, kind="cross")
    assert table[4].scores["punctuation"] == pytest.approx(float(cross[0, 1, :, 3].mean()))
    encoder = regard.heads(recording, part="encoder")
    assert encoder[0].scores["punctuation"] == pytest.approx(float(recording.map(0, part="encoder")[0, 0, :, 3].mean()))
    assert "duplicate" in regard.heads(recording, part="decoder")[0].scores
    assert regard.rollout(recording, part="encoder").shape == (1, 7, 7)
    assert regard.rollout(recording).shape == (1, 5, 5)
    found = regard.compare(recording, recording, kind="cross")
    assert (found.query_words, found.words) == ([target], ([source], [source]))


def test_a_head_of_cross_attention_is_knocked_out():
    model, rows = make_translator("transformer"), sentences(6)
    plain = translate(model, rows, end=END, longest=5)
    with intervene(model, regard.KnockOut(layer="decoder.1.cross", kind="cross")):
        changed = translate(model, rows, end=END, longest=5)
    assert plain[0].score != changed[0].score
    with record(model) as recording:
        translate(model, rows, end=END, longest=5)
    with pytest.raises(ConfigError, match="belong to another text"):
        regard.rollout(recording, kind="cross")
