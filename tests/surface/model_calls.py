"""The calls of the other rooms: models, what is done with them, and pictures of what was recorded."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.text import BytePair
from surface import wrong
from surface.call import Call, method
from surface.map_calls import SLICE
from surface.mechanism_calls import SIZES
from surface.observe_calls import HEAD, LAYER, OWN_SCORES, PART, PATH, folder, record_layer
from surface.wrong import CHOICE, COUNT, MASK, NUMBER, OBJECT, SCALARS, STRANGE, Wrong, constant, without

SIZE = COUNT | SIZES
FLAG = SCALARS | constant(a_number=1)
IMAGE = without(SCALARS, "none", "an empty list") | constant(a_number=3, no_file="nothing.png")
ATTRIBUTION = without(OBJECT, "none")
NAME = without(OBJECT, "a string", "a long string", "a lone surrogate")
OPTIONAL_HEAD = without(
    HEAD, "an empty list", "a list", "out of range", "before the first", "huge", "negative and huge", "beyond floats"
)
OPTIONAL_LAYER = without(
    OPTIONAL_HEAD, "a string", "a lone surrogate", "a long string", "a fraction", "not a number"
) | constant(a_fraction=1.5)
PLACES = without(STRANGE, "a set") | wrong.FRACTIONS | constant(a_list_of_strings=["a"])
KIND = CHOICE


def config() -> regard.GPT2Config:
    return regard.GPT2Config(layers=1, heads=2, width=8, context=16, vocabulary=50257)


@cache
def gpt2() -> regard.GPT2:
    torch.manual_seed(0)
    made = regard.GPT2(config()).eval()
    made.text = BytePair.gpt2()
    return made


@cache
def read_by_gpt2() -> Any:
    with regard.record(gpt2()) as recording:
        gpt2()(torch.tensor([[1, 2]]))
    return recording


def save_recording() -> Any:
    path = folder() / "kept.regard"
    record_layer().save(path)
    return path


def run_with_changes(model: Any = None, changes: Any = ()) -> None:
    with regard.intervene(gpt2() if model is None else model, *changes):
        gpt2()(torch.tensor([[1, 2]]))


def record(model: Any = None, **options: Any) -> None:
    with regard.record(nn.Identity() if model is None else model, **options):
        pass


def make_run_with(change: Any) -> Any:
    return lambda **options: run_with_changes(changes=[change(**options)])


def generate_tokens(tokens: Any = (1, 2), max_new_tokens: Any = 2, **settings: Any) -> Any:
    return list(gpt2().generate(torch.tensor([tokens]) if tokens == (1, 2) else tokens, max_new_tokens, **settings))


def complete_text(text: Any = "a", max_new_tokens: Any = 2, **settings: Any) -> Any:
    return list(gpt2().complete(text, max_new_tokens, **settings))


SETTINGS: dict[str, Wrong] = {
    "max_new_tokens": COUNT,
    "temperature": without(NUMBER, "none") | constant(negative=-1.0, infinity=float("inf")),
    "top_k": without(COUNT, "huge", "none", "beyond floats"),
    "top_p": without(NUMBER, "none") | constant(negative=-1.0, above_1=1.5),
    "min_p": without(NUMBER, "none") | constant(negative=-1.0, above_1=1.5),
    "beams": SIZE,
    "seed": without(COUNT, "none", "negative"),
}
SETTINGS |= {
    "repetition_penalty": without(NUMBER, "none")
    | constant(negative=-1.0, infinity=float("inf"), nothing=0.0, overflowing=1e-40),
    "stop": wrong.FRACTIONS | wrong.DTYPES | constant(bytes=b"1", an_object=object(), a_dict={"a": 1}, huge=10**30),
    "end": without(COUNT, "none"),
    "draft": without(OBJECT, "none"),
    "after": without(OBJECT, "none"),
}
SETTINGS["seed"] = without(COUNT, "none", "negative", "huge", "beyond floats")
TOKENS: Wrong = (
    wrong.NONE
    | STRANGE
    | wrong.FRACTIONS
    | {
        "of floats": lambda: torch.ones(1, 3),
        "outside the vocabulary": lambda: torch.tensor([[1, 60000]]),
        "negative": lambda: torch.tensor([[-1]]),
        "three axes": lambda: torch.ones(1, 1, 1, dtype=torch.int64),
        "sparse": lambda: torch.ones(1, 3, dtype=torch.int64).to_sparse(),
        "bools": lambda: torch.ones(1, 3).bool(),
    }
)
CHANGE = {"layer": OPTIONAL_LAYER, "head": OPTIONAL_HEAD, "kind": KIND}
CALLS = [
    Call(
        "GPT2Config",
        regard.GPT2Config,
        lambda: {"layers": 1, "heads": 2, "width": 8},
        {
            **dict.fromkeys(("layers", "heads", "width", "context", "vocabulary"), SIZE),
            "dropout": NUMBER | constant(one=1.0),
            "inner": COUNT,
            "activation": CHOICE,
            "epsilon": NUMBER | constant(negative=-1.0),
            "tied": FLAG,
        },
    ),
    *(Call(f"GPT2Config.{name}", getattr(regard.GPT2Config, name), dict, {}) for name in ("small", "medium", "large", "xl")),
    Call("GPT2", regard.GPT2, lambda: {"config": config()}, {"config": OBJECT}),
    method("GPT2.forward", gpt2, lambda: {"tokens": torch.tensor([[1, 2]])}, tokens=TOKENS, mask=MASK, cache={}),
    Call("GPT2.generate", generate_tokens, dict, {"tokens": without(TOKENS, "sparse"), **SETTINGS}),
    Call(
        "GPT2.complete",
        complete_text,
        dict,
        {"text": without(SCALARS, "a string", "a long string") | wrong.FRACTIONS, **SETTINGS},
    ),
    Call(
        "GPT2.load",
        regard.GPT2.load,
        lambda: {"name": "pocket"},
        {"name": PATH | constant(nowhere="/no/such"), "dtype": without(CHOICE, "none")},
    ),
    method("GPT2.save", gpt2, lambda: {"folder": folder() / "model"}, folder=PATH),
    Call("quantise", regard.quantise, lambda: {"model": gpt2()}, {"model": OBJECT, "to": CHOICE}),
    Call(
        "record",
        record,
        dict,
        {
            "model": without(OBJECT, "none"),
            "layers": without(SCALARS, "none", "an empty list", "a list", "a set") | wrong.FRACTIONS,
            "heads": without(SCALARS, "none", "an empty list", "a list", "a set") | wrong.FRACTIONS,
            "keep": without(CHOICE, "none", "an empty list"),
            "to": without(PATH, "none"),
        },
    ),
    Call(
        "intervene",
        run_with_changes,
        lambda: {"changes": [regard.KnockOut(0)]},
        {"model": without(OBJECT, "none"), "changes": constant(a_number=[3])},
    ),
    Call(
        "KnockOut",
        make_run_with(regard.KnockOut),
        lambda: {"layer": 0},
        CHANGE | {"by": CHOICE, "source": without(OBJECT, "none")},
    ),
    Call("CutEdges", make_run_with(regard.CutEdges), lambda: {"layer": 0}, {"queries": PLACES, "keys": PLACES, **CHANGE}),
    Call(
        "Temperature",
        make_run_with(regard.Temperature),
        lambda: {"layer": 0},
        {"t": NUMBER | constant(zero=0.0, infinity=float("inf")), **CHANGE},
    ),
    Call(
        "Patch",
        make_run_with(regard.Patch),
        lambda: {"layer": 0, "recording": read_by_gpt2()},
        {"recording": OBJECT, "of": CHOICE, "queries": PLACES, **CHANGE},
    ),
    Call(
        "load",
        regard.load,
        lambda: {"path": save_recording()},
        {"path": PATH | constant(nowhere="/no/such"), "verify": FLAG},
    ),
    Call(
        "examine_kernel",
        regard.examine_kernel,
        lambda: {"kernel": F.scaled_dot_product_attention, "expects": regard.Everything()},
        {
            "kernel": OBJECT,
            "reference": without(OBJECT, "none"),
            "expects": MASK,
            "scale": without(NUMBER, "none") | constant(zero=0),
            "offset": without(COUNT, "none", "negative", "huge"),
            "outputs": without(SCALARS, "an empty list"),
            "backward": without(OBJECT, "none"),
            "dropout": without(SCALARS, "none") | wrong.FRACTIONS | constant(a_number=3),
            "dtype": SCALARS | constant(an_integer=torch.int64, a_class=int),
            "device": without(SCALARS, "a string") | constant(no_device="nowhere"),
        },
    ),
    Call(
        "examine",
        regard.examine,
        lambda: {"subject": regard.SelfAttention(4, 4), "expects": regard.Everything()},
        {
            "subject": without(OBJECT, "a class"),
            "expects": MASK,
            "sample": without(SCALARS, "none", "an empty list") | wrong.FRACTIONS,
            "scale": without(NUMBER, "none") | constant(zero=0),
            "offset": without(COUNT, "negative"),
            "time_limit_seconds": without(NUMBER, "none") | constant(negative=-1.0, zero=0),
            "strict": FLAG,
        },
    ),
    Call(
        "figure",
        regard.figure,
        lambda: {"recording": record_layer(), "layer": 0, "head": 0},
        {
            "recording": OBJECT,
            "layer": LAYER,
            "head": LAYER,
            "queries": SLICE,
            "keys": SLICE,
            "kind": without(CHOICE, "none"),
            "part": PART,
            "row": without(COUNT, "negative") | constant(out_of_range=7),
            "title": without(SCALARS, "none", "a string", "a long string", "a lone surrogate"),
        },
    ),
    Call(
        "page",
        regard.page,
        lambda: {"recording": record_layer(), "path": folder() / "page.html"},
        {"recording": OBJECT, "path": PATH, "scores": OWN_SCORES, "image": IMAGE, "attribution": ATTRIBUTION, "number": NAME},
    ),
    method(
        "Recording.page",
        record_layer,
        lambda: {"height": 400},
        height=COUNT,
        scores=OWN_SCORES,
        image=IMAGE,
        attribution=ATTRIBUTION,
        number=without(NAME, "none"),
    ),
    Call(
        "serve",
        lambda **given: regard.serve(**given),
        lambda: {"subject": record_layer()},
        {
            "subject": OBJECT,
            "host": constant(an_object=object(), a_number=3, nowhere="no such host"),
            "port": COUNT,
            "text": without(SCALARS, "none", "a string", "a long string", "a lone surrogate"),
            "open_browser": FLAG,
            "scores": OWN_SCORES,
            "image": IMAGE,
            "attribution": ATTRIBUTION,
            "number": without(NAME, "none"),
        },
    ),
]
