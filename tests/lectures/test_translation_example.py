import torch

from regard import AdditiveAttention
from regard.lectures.translation_example import build_translation_example
from regard.show.arithmetic import write_arithmetic
from regard.show.step_descriptions import describe_example

WORDS, SOURCES = ("un", "cheval", "."), ("a", "horse", "runs", ".", "⟨end⟩")


def example(**other):
    torch.manual_seed(2)
    with torch.no_grad():
        layer = AdditiveAttention(7, 11, 13).double()
        states, annotations = torch.randn(3, 7, dtype=torch.float64), torch.randn(5, 11, dtype=torch.float64)
        return build_translation_example(WORDS, SOURCES, states, annotations, layer, model="one", **other), layer


def test_queries_are_states_and_keys_are_annotations_and_the_formula_holds():
    one, layer = example()
    states, annotations = one.before[1].panels[0].values, one.before[0].panels[0].values
    scores = (layer.weight * (layer.W_query(states)[:, None] + layer.W_key(annotations)[None]).tanh()).sum(-1)
    torch.testing.assert_close(one.steps.scores, scores)
    torch.testing.assert_close(one.steps.weights, scores.softmax(-1))
    torch.testing.assert_close(one.steps.context, scores.softmax(-1) @ annotations)
    assert torch.equal(one.q, layer.W_query(states))
    assert torch.equal(one.k, layer.W_key(annotations))


def test_words_of_two_sentences_are_distinguished():
    one, _ = example()
    assert one.keys == SOURCES
    assert one.words[one.focus] == "cheval"
    told = {scene.name: scene for scene in describe_example(one)}
    best = SOURCES[int(one.steps.weights[1].argmax())]
    assert told["weights"].sentence.startswith(f"‘cheval’ attends most to ‘{best}’ (")
    assert told["scores"].sentence.startswith(f"‘cheval’ matches ‘{best}’ best (")
    assert told["context"].sentence.startswith("‘cheval’ receives ")
    assert (told["weights"].panels[0].rows, told["weights"].panels[0].columns) == (WORDS, SOURCES)
    assert told["context"].panels[0].rows == WORDS
    for scene in describe_example(one):
        for panel in scene.panels:
            assert panel.values.shape == (len(panel.rows), len(panel.columns))
            assert not panel.values.requires_grad


def test_the_row_of_a_word_is_written_out_over_the_words_of_the_source():
    one, _ = example()
    shown = write_arithmetic(one, 1)
    assert [line.label for line in shown[0].lines] == [*SOURCES]
    assert "The numbers of ‘cheval’ plus those of each word" in shown[0].sentence
    assert [line.label for line in write_arithmetic(one, 2, range(1, 3))[0].lines] == ["horse", "runs"]


def test_a_sentence_of_one_word_is_matched_with_it_and_not_with_itself():
    layer = AdditiveAttention(2, 3, 5).requires_grad_(False)
    one = build_translation_example(("oui",), ("yes",), torch.ones(1, 2), torch.ones(1, 3), layer, model="one")
    assert next(scene for scene in describe_example(one) if scene.name == "scores").sentence.startswith(
        "‘oui’ is compared only with ‘yes’ ("
    )
