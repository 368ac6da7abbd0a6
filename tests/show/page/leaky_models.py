"""Models that see what they may not, or cannot be asked who sees whom."""

import torch

from regard.layers.multi_head import MultiHeadAttention
from regard.mechanism import attention, heads
from regard.models import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from show.page.server_client import Layer

LAYER = 2  # of the pocket model's six
TEXT = "Lily had a red ball. Tom had a blue ball. Lily gave her red ball to Tom."
WORDS = ["Lily", " had", " a", " red", " ball", ".", " Tom", " had", " a", " blue", " ball", "."]  # its first twelve


class Unmasked(MultiHeadAttention):
    """A layer that has lost its mask."""

    def forward(self, x, past=None, mask=None):
        return self.out_proj(heads.join(attention(*self.project(x))))


def make_leaky_model() -> GPT2Adapter:
    """The pocket model with a layer that sees what comes later."""
    model = GPT2.load("pocket")
    model.blocks[LAYER].attention.__class__ = Unmasked
    return GPT2Adapter("leaking", model)


class Mute(torch.nn.Module):
    """A model that attends, and whose answer is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = torch.nn.Embedding(7, 5), Layer()

    def forward(self, ids):
        self.layer(self.embedding(ids)[:, None])
        return "nothing"


class MuteSpeaker:
    """It, with numbers for words."""

    name, context = "mute", None

    def __init__(self) -> None:
        self.model = Mute()

    def tokens(self, text, most):
        return torch.tensor([[1, 2, 3]]), ["one", " two", " three"], 3

    def encode(self, text):
        return [1, 2, 3]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def run(self, ids):
        return self.model(ids)
