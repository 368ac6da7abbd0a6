"""A sentence and its translation as an example: the additive attention of a trained decoder."""

from collections.abc import Sequence

from torch import Tensor

from regard.layers import AdditiveAttention
from regard.lectures.example_steps import Example, ExampleStep, make_word_panel


def build_translation_example(
    words: Sequence[str],
    sources: Sequence[str],
    states: Tensor,
    annotations: Tensor,
    layer: AdditiveAttention,
    *,
    model: str,
    notes: Sequence[str] = (),
) -> Example:
    """Show every step of the attention with which words were generated, from a decoder's states to an encoder's annotations.

    Shapes: states (t, query_width), before each word; annotations (s, key_width), one for each source word.
    """
    words, sources = tuple(words), tuple(sources)
    q, k = layer.W_query(states), layer.W_key(annotations)
    return Example(
        name="translated",
        title="Additive attention of a trained translator",
        source=f"Bahdanau et al. 2014, appendix A.1.2; with the numbers of {model}",
        words=words,
        sources=sources,
        focus=max(range(len(words)), key=lambda n: len(words[n]) * words[n].isalpha()),  # the longest word
        q=q,
        k=k,
        v=annotations,
        weight=layer.weight.detach(),
        steps=layer.steps(states, annotations),
        formulas={"scores": "weightᵀ tanh(q + k)", "context": "weights annotations"},
        before=(
            ExampleStep(
                "annotations",
                "encoder(source)",
                "One RNN reads the sentence forward, another backward: their states at a word are its annotation.",
                (make_word_panel(annotations, sources, "a"),),
            ),
            ExampleStep(
                "states",
                "decoder(the words before)",
                f"The decoder's state before it generates ‘{words[0]}’, and before each word after that.",
                (make_word_panel(states, words, "s"),),
            ),
            ExampleStep(
                "q, k",
                "states W_query, annotations W_key",
                f"States and annotations are added in a hidden layer of {q.shape[-1]} numbers; W_query and W_key were learned.",
                (make_word_panel(q, words, "q", "query"), make_word_panel(k, sources, "k", "key")),
            ),
        ),
        notes=tuple(notes),
        leads_to="additive",
    )
