"""The gallery of the start page: findings by name, each with a text that shows it, for any model that can read the text."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from regard.mechanism import Everything
from regard.models import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.observe import Recording, record
from regard.observe.attention_changes import Change
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.intervene import intervene
from regard.show.page import translator_adapter
from regard.show.page.finding import LEAK
from regard.show.page.model_adapter import ModelAdapter, can_read
from regard.show.page.translator_adapter import TranslatorAdapter

BALLS = "Lily had a red ball and Tom had a blue ball. Lily gave her red ball to Tom, and Tom gave his blue ball to Lily."
WORDS = "ball dog tree happy water girl door flower"
STORY = (
    "Once upon a time there was a little girl. She had a red ball and she liked to play in the park. One day she saw a big "
    "dog. The dog was sad because it was lost. The girl gave the dog her ball, and they played until the sun went down. "
)
LONG = "long"  # the name of the long text, which shows the head that the page opens on
OPENING = "opening"  # the name of the first finding of its kind that a model has
UNMASKED_LAYER = 2  # of the pocket model, for the mask that leaks


@dataclass(frozen=True)
class GalleryItem:
    """A finding to show: its name, the kind of head or None, a title, the view, and what the model reads.

    `text` is empty for what another model reads: a translator, or one whose mask leaks. `link` is that of a fixed example.
    """

    name: str
    title: str
    view: str
    what: str | None = None
    text: str = ""
    link: str | None = None


ITEMS = (
    GalleryItem("induction", "Repeated words: what came next before", "type", None, " ".join([WORDS] * 4)),
    GalleryItem("previous", "The token before: a diagonal", "map", "previous token", BALLS),
    GalleryItem("sink", "The first token: a sink", "map", "first token", BALLS),
    GalleryItem("translation", "A translation, word by word", "text"),
    GalleryItem(LEAK, "A mask that leaks", "map", LEAK),
    GalleryItem("six", "Six words, step by step", "steps", link="example=simple"),
    GalleryItem(LONG, "A long text as a map", "map", text=STORY * 8),
)


@dataclass(frozen=True, eq=False)
class LiftMask(Change):
    """Let every query of a layer see every key."""

    def change_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        return replace(call, mask=Everything())


def list_gallery(adapter: ModelAdapter | TranslatorAdapter | None) -> list[GalleryItem]:
    """List the items that a page can show: those with a text only where its model can read it."""
    if adapter is None or isinstance(adapter, TranslatorAdapter):
        return []
    translates = translator_adapter.has_example()
    return [item for item in ITEMS if (can_read(adapter, item.text) if item.text else item.name != "translation" or translates)]


def list_openings(adapter: ModelAdapter | TranslatorAdapter | None) -> Iterator[GalleryItem]:
    """Generate the items with which a page can open, the most telling first; all in Type, where the text can be changed."""
    for item in list_gallery(adapter):
        if item.text and item.name != LONG:
            yield replace(item, view="type", what=None)


def record_leak() -> Recording:
    """Record the pocket model on a text, with a layer whose queries see every key."""
    adapter = GPT2Adapter("pocket", GPT2.load("pocket"))
    ids, words, _ = adapter.tokens(BALLS, None)
    with torch.inference_mode(), intervene(adapter.model, LiftMask(layer=UNMASKED_LAYER)), record(adapter.model) as recording:
        adapter.run(ids)
    recording.model = f"pocket, layer {UNMASKED_LAYER} without its mask"
    recording.tokens = words
    return recording
