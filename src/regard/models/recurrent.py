"""The RNN translator without and with attention: an RNN reads a sentence, another writes it in another language.

Read it from top to bottom. Without attention all that the decoder gets of the source is one vector, the encoder's last
state; with it the decoder attends, before each word, to the encoder's annotation of every word. Nothing else differs
between the two. Source: Cho et al. 2014 and, for attention, Bahdanau et al. 2014, sections 3 and 4, and appendix A.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.errors import ConfigError
from regard.layers import AdditiveAttention, checks
from regard.matmul import refuse_quantized
from regard.mechanism.request import check_probability
from regard.models.translator_parts import Lengths, Vocabulary, check_lengths, check_token_matrix, make_padding_mask
from regard.text import BytePair
from regard.weights import translator_weights as files

CELLS = {"gru": nn.GRU, "lstm": nn.LSTM}
States = tuple[Tensor, ...]  # (layers, b, hidden) each: the state of a GRU, or the state and the memory of an LSTM


@dataclass(frozen=True, eq=False)
class RecurrentMemory:
    """The encoder's output: an annotation for each token, (b, s, 2 hidden), and its last states."""

    annotations: Tensor
    lengths: Lengths
    summary: Tensor  # (b, 2 hidden), the last states of both directions
    start: States  # of the decoder


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """The decoder's state, and what it attends to in the sources."""

    memory: RecurrentMemory
    keys: Tensor | None  # the annotations projected by the attention, (b, s, hidden); None without attention
    hidden: States

    def select_rows(self, index: Tensor) -> "RecurrentState":
        """Return the state of these rows, which may repeat."""
        old = self.memory
        lengths = tuple(old.lengths[row] for row in index.tolist())
        start = tuple(x[:, index] for x in old.start)
        memory = RecurrentMemory(old.annotations[index], lengths, old.summary[index], start)
        keys = None if self.keys is None else self.keys[index]
        return RecurrentState(memory, keys, tuple(x[:, index] for x in self.hidden))


class RecurrentTranslator(nn.Module):
    """A bidirectional encoder, a decoder that reads the previous word and a context, and an output layer that reads all three.

    attention=None: the context is the encoder's last states, at every step, as in Cho et al. 2014 (and not at the first
    alone, as in Sutskever et al. 2014), so that the two models differ in where the context comes from and in nothing else.
    attention="additive": the context is the attention of the decoder's last state to the annotations.

    The first state is s₀ = tanh(W_s ←h₁) (appendix A.2.2); an LSTM's memory starts at zero. The next word's distribution is
    softmax(E tanh(W [s_i; y_{i-1}; c_i])), as g in equation 4, without the appendix's maxout. With several layers the first
    reads word and context, and the last one's state is the query.
    Shapes: sources (b, s), of which the first lengths (b,) are no padding; targets (b, t); logits (b, t, n).
    """

    KIND = "recurrent"
    context = None  # sentences may have any length

    def __init__(
        self,
        attention: str | None = None,
        *,
        vocabulary: int,
        width: int = 256,
        hidden: int = 256,
        layers: int = 1,
        cell: str = "gru",
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        checks.check_sizes(vocabulary=vocabulary, width=width, hidden=hidden, layers=layers)
        if attention not in (None, "additive"):
            raise ConfigError(f'attention must be None or "additive", got {attention!r}.')
        if cell not in CELLS:
            raise ConfigError(f"cell must be one of {', '.join(CELLS)}; got {cell!r}.")
        self.sizes: dict[str, Any] = {
            "attention": attention,
            "vocabulary": vocabulary,
            "width": width,
            "hidden": hidden,
            "layers": layers,
            "cell": cell,
            "dropout": check_probability(dropout),
            "tied": tied,
        }
        self.text: BytePair | None = None
        between = dropout if layers > 1 else 0.0
        self.vocabulary = Vocabulary(vocabulary, width, tied)
        self.encoder = CELLS[cell](width, hidden, layers, batch_first=True, dropout=between, bidirectional=True)
        self.start = nn.Linear(hidden, hidden)
        self.decoder = CELLS[cell](width + 2 * hidden, hidden, layers, batch_first=True, dropout=between)
        self.attention = AdditiveAttention(hidden, 2 * hidden, hidden) if attention else None
        self.readout = nn.Linear(hidden + width + 2 * hidden, width)
        self.dropout = nn.Dropout(dropout)
        self.init_weights()

    def forward(self, sources: Tensor, lengths: Tensor | Sequence[int], targets: Tensor) -> Tensor:
        """Compute the logits of what comes after each target token, given the source and the targets up to it."""
        check_token_matrix("targets", targets)
        return self.decode(targets, self.begin(self.encode(sources, lengths)))[0]

    def encode(self, sources: Tensor, lengths: Tensor | Sequence[int]) -> RecurrentMemory:
        """Encode the sources in both directions; packed, so that neither direction reads padding."""
        found = check_lengths(sources, lengths)
        x = self.dropout(self.vocabulary.embed_source(sources))
        packed = pack_padded_sequence(x, torch.tensor(found), batch_first=True, enforce_sorted=False)
        read, last = self.encoder(packed)
        annotations, _ = pad_packed_sequence(read, batch_first=True, total_length=sources.shape[1])
        last = last[0] if isinstance(last, tuple) else last  # (2 layers, b, hidden), forward and backward alternating
        state = self.start(last[1::2]).tanh()
        start = (state, torch.zeros_like(state)) if isinstance(self.encoder, nn.LSTM) else (state,)
        return RecurrentMemory(annotations, found, torch.cat((last[-2], last[-1]), -1), start)

    def begin(self, memory: RecurrentMemory) -> RecurrentState:
        """Return the state before the first target token; the attention's keys are projected once a sentence."""
        return RecurrentState(
            memory, None if self.attention is None else self.attention.project(memory.annotations), memory.start
        )

    def read(self, tokens: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Read one target token (b,) of each row; return the logits (b, n) of what comes after it, and the new state."""
        logits, state = self.decode(tokens.unsqueeze(1), state)
        return logits[:, 0], state

    def decode(self, targets: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Read target tokens (b, t) after those of the state; return the logits (b, t, n) and the new state."""
        words = self.dropout(self.vocabulary.embed_target(targets))
        states, contexts, hidden = (
            self.decode_with_summary(words, state)
            if state.keys is None
            else self.decode_with_attention(words, state, state.keys)
        )
        seen = torch.cat((states, words, contexts), -1)
        output = self.dropout(self.readout(seen).tanh())
        return self.vocabulary.compute_logits(output), RecurrentState(state.memory, state.keys, hidden)

    def decode_with_summary(self, words: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, States]:
        """Run the decoder with the summary as each word's context.

        Returns the top layer's state after each word, the contexts, and the last states of all layers.
        """
        contexts = state.memory.summary.unsqueeze(1).expand(-1, words.shape[1], -1)
        states, hidden = self.run_cells(torch.cat((words, contexts), -1), state.hidden)
        return states, contexts, hidden

    def decode_with_attention(self, words: Tensor, state: RecurrentState, keys: Tensor) -> tuple[Tensor, Tensor, States]:
        """Run the decoder with a context for each word, the attention of the state before it to the annotations.

        Returns the top layer's state after each word, the contexts, and the last states of all layers.
        """
        attention, annotations, hidden = cast(AdditiveAttention, self.attention), state.memory.annotations, state.hidden
        mask = make_padding_mask(state.memory.lengths, annotations.shape[1])
        states, contexts = [], []
        for word in words.split(1, 1):
            context = attention.attend_projected(hidden[0][-1].unsqueeze(1), keys, annotations, mask)
            top, hidden = self.run_cells(torch.cat((word, context), -1), hidden)
            states.append(top)
            contexts.append(context)
        return torch.cat(states, 1), torch.cat(contexts, 1), hidden

    def run_cells(self, x: Tensor, hidden: States) -> tuple[Tensor, States]:
        """Run torch's own cells over vectors (b, t, width + 2 hidden)."""
        states, last = self.decoder(x, hidden if isinstance(self.decoder, nn.LSTM) else hidden[0])
        return states, last if isinstance(last, tuple) else (last,)

    def init_weights(self) -> None:
        """Initialize the matrices from state to state as orthogonal, as in appendix B.1; the rest as torch does."""
        for name, weight in (*self.encoder.named_parameters(), *self.decoder.named_parameters()):
            if name.startswith("weight_hh"):
                for gate in weight.split(weight.shape[1]):
                    nn.init.orthogonal_(gate)

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a folder that `regard.models.translator.load` reads, with the text if there is one.

        dtype is that of the stored numbers, the model's own by default; with torch.int8 matrices have one scale a row.
        """
        refuse_quantized(self)
        files.save_translator(folder, self.KIND, self.sizes, self.state_dict(), self.text, dtype)
