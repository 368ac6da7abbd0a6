"""A sentence and its translation as an example: the additive attention of a trained decoder."""

from collections.abc import Sequence

from torch import Tensor

from regard.layers import AdditiveAttention
from regard.lectures.scenes import Example, Scene, of_words


def translated(
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
        before=(read(sources, annotations), asked(words, states), met(words, sources, q, k)),
        notes=tuple(notes),
        leads_to="additive",
    )


def read(sources: tuple[str, ...], annotations: Tensor) -> Scene:
    """Show the encoder's annotations of the source."""
    said = "One RNN reads the sentence forward, another backward: their states at a word are its annotation."
    return Scene("annotations", "encoder(source)", said, (of_words(annotations, sources, "a"),))


def asked(words: tuple[str, ...], states: Tensor) -> Scene:
    """Show the decoder's states."""
    said = f"The decoder's state before it generates {words[0]}, and before each word after that."
    return Scene("states", "decoder(the words before)", said, (of_words(states, words, "s"),))


def met(words: tuple[str, ...], sources: tuple[str, ...], q: Tensor, k: Tensor) -> Scene:
    """Show the queries and keys."""
    said = f"States and annotations are added in a hidden layer of {q.shape[-1]} numbers; W_query and W_key were learned."
    panels = (of_words(q, words, "q", "query"), of_words(k, sources, "k", "key"))
    return Scene("q, k", "states W_query, annotations W_key", said, panels)
