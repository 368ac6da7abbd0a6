"""The calls of `regard.observe`."""

import atexit
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.masking_utils
import transformers.modeling_utils  # noqa: F401

import regard
from head_atlas import small_atlas
from regard.map import DifferentiableMap
from regard.observe import Recording
from surface import wrong
from surface.call import Call, method
from surface.map_calls import BAD_SLICES, INDEX, SIZE, SLICE, a_map
from surface.mechanism_calls import K, Q
from surface.wrong import CHOICE, COUNT, HUGE, NUMBER, OBJECT, PLACE, SCALARS, constant, without


@cache
def record_layer() -> Recording:
    """Of a layer of two heads on five tokens."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(4, 6, 9, 0.0, 2)
    with regard.record(layer, keep="values") as recording:
        layer(torch.randn(1, 5, 4))
    recording.tokens = list("abcab")
    return recording


@cache
def differentiable() -> tuple[Recording, torch.Tensor]:
    """A recording with the graph of its forward, and a number of it."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(4, 6, 9, 0.0, 2)
    with regard.record(layer, keep="values") as recording:
        number = layer(torch.randn(1, 5, 4)).sum()
    return recording, number


def graph() -> Recording:
    return differentiable()[0]


def record_number() -> torch.Tensor:
    return differentiable()[1]


@cache
def folder() -> Path:
    """A folder that is there until the tests end."""
    kept = tempfile.TemporaryDirectory()
    atexit.register(kept.cleanup)
    return Path(kept.name)


@cache
def language_model() -> regard.GPT2:
    """One layer of two heads with 30 tokens."""
    torch.manual_seed(0)
    return regard.GPT2(regard.GPT2Config(layers=1, heads=2, width=8, context=12, vocabulary=30))


@cache
def record_residual() -> Recording:
    """Of a language model, with the residual stream after its block."""
    with regard.record(language_model(), keep="residual") as recording:
        language_model()(torch.tensor([[1, 2, 3]]))
    return recording


def record_cross_attention(queries: int, keys: int) -> Recording:
    """Of a decoder layer that attends from so many tokens to so many others."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    with regard.record(layer) as recording:
        layer(torch.randn(1, queries, 4), torch.randn(1, keys, 4))
    return recording


@cache
def record_sound() -> Recording:
    """Of a decoder layer that attends to five frames of sound."""
    recording = record_cross_attention(3, 5)
    recording.places = {"cross": regard.AudioFrames(0.5)}
    return recording


@cache
def record_image() -> Recording:
    """Of an image of two by three patches that attends to four words."""
    return record_cross_attention(6, 4)


@cache
def one_process() -> dist.ProcessGroup:
    """A process group of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)
    return dist.new_group([0])


def grid() -> regard.PatchGrid:
    return regard.PatchGrid(2, 3)


def frames() -> regard.AudioFrames:
    return regard.AudioFrames(0.5)


class Sum(torch.nn.Module):
    """The running sums of tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-2)


def differentiable_map() -> DifferentiableMap:
    return graph().map(0, grad=True)


def table() -> Any:
    return regard.heads(record_layer())


FLAG = SCALARS | wrong.FRACTIONS | constant(a_number=3)
LAYER = PLACE | wrong.LISTS
HEAD = without(LAYER, "none")
PART = without(CHOICE, "none")
LAYERS = without(SCALARS | wrong.FRACTIONS, "none", "an empty list") | constant(
    out_of_range=[7], of_fractions=[0.5], a_number=0
)
PATH = without(SCALARS, "a string") | wrong.FRACTIONS | constant(a_number=3, a_null=" \0")
SOUGHT = {"kind": CHOICE, "part": PART}
TOKENS = without(SCALARS, "none") | wrong.FRACTIONS | constant(a_number=3, of_numbers=[1, 2, 3, 4, 5], mixed=["a", ["b"]])
OWN_SCORES = without(SCALARS, "an empty list") | constant(a_number=3, no_function=["entropy"], no_docstring=[lambda m: m])
ONE_LAYER = {"layer": LAYER, **SOUGHT}
FIRST = {"layer": 0}
CALLS = [
    Call(
        "attends",
        regard.attends,
        lambda: {"weights": torch.ones(4, 5, 3), "values": torch.ones(4, 3, 2), "heads": 2},
        {"weights": wrong.TENSOR, "values": wrong.TENSOR, "heads": without(COUNT, "none")},
    ),
    Call(
        "implied_map",
        lambda module, x, **named: regard.implied_map(module, x, **named),
        lambda: {"module": torch.nn.Sequential(torch.nn.Linear(4, 3), Sum()), "x": torch.ones(2, 5, 4)},
        {
            "module": OBJECT,
            "inputs": {},
            "x": wrong.NONE | wrong.STRANGE | wrong.LISTS | wrong.FRACTIONS,
            "values": without(SCALARS, "none") | wrong.FRACTIONS | constant(a_number=3, no_view=("0", 3)),
            "output": without(SCALARS, "none", "a string") | wrong.FRACTIONS | constant(a_number=3, no_view=("0", 3)),
        },
    ),
    method("Recording.map", record_layer, lambda: FIRST, **ONE_LAYER, head=HEAD, grad=FLAG),
    method("Recording.residual", record_residual, lambda: FIRST, layer=LAYER, part=PART),
    Call(
        "map.DifferentiableMap",
        lambda weights, q, k: DifferentiableMap(weights, q, k),
        lambda: {"weights": a_map(), "q": torch.ones(Q), "k": torch.ones(K)},
        {"weights": {}, "q": {}, "k": {}},  # made by Recording.map
    ),
    method("DifferentiableMap.dense", differentiable_map, dict),
    method("DifferentiableMap.entropy", differentiable_map, dict),
    method("DifferentiableMap.mass", differentiable_map, lambda: {"keys": slice(0, 3)}, keys=INDEX | wrong.NONE),
    method(
        "DifferentiableMap.select",
        differentiable_map,
        lambda: {"batch": 0, "heads": [0, 1]},
        batch=INDEX | wrong.NONE,
        heads=INDEX | wrong.NONE,
    ),
    *(method(f"Recording.{name}", record_layer, lambda: FIRST, **ONE_LAYER) for name in ("heads", "values", "words")),
    method("Recording.layers", record_layer, dict, **SOUGHT),
    Call(
        "Recording.__getitem__",
        lambda name: record_layer()[name],
        lambda: {"name": record_layer().names[0]},
        {"name": SCALARS | wrong.FRACTIONS | constant(a_number=0)},
    ),
    method("Recording.__iter__", record_layer, dict),
    method("Recording.__contains__", record_layer, lambda: {"name": "x"}, name={}),
    method(
        "Recording.save",
        record_layer,
        lambda: {"path": folder() / "saved.regard"},
        path=without(SCALARS, "a string", "bytes") | wrong.FRACTIONS,
    ),
    method(
        "Recording.attribute",
        graph,
        lambda: {"number": record_number()},
        number=SCALARS | wrong.FRACTIONS | constant(a_number=3, of_parameters=torch.ones((), requires_grad=True)),
        layers=LAYERS,
    ),
    Call(
        "Recording.tokens",
        lambda tokens: setattr(Recording(), "tokens", tokens),
        lambda: {"tokens": ["a", "b"]},
        {"tokens": without(TOKENS, "an empty list", "a list of strings", "an int tensor", "a bool tensor", "uint8")},
    ),
    Call(
        "Recording.places",
        lambda places: setattr(Recording(), "places", places),
        lambda: {"places": regard.PatchGrid(2, 3)},
        {"places": without(SCALARS, "none") | wrong.FRACTIONS | constant(a_number=3, of_numbers=[1, 2])},
    ),
    method("Recording.axis_places", record_layer, lambda: FIRST, **ONE_LAYER),
    Call(
        "PatchGrid",
        regard.PatchGrid,
        lambda: {"rows": 2, "columns": 3},
        {
            "rows": COUNT | constant(zero=0),
            "columns": COUNT | constant(zero=0),
            "start": without(COUNT, "none"),
            "order": without(SCALARS, "none") | wrong.FRACTIONS | constant(a_number=3, twice=[0, 1, 2, 3, 4, 4]),
            "names": without(SCALARS, "an empty list", "a list", "a list of strings") | constant(a_number=3),
            **dict.fromkeys(("has_queries", "has_keys"), SCALARS | constant(a_number=1)),
            "extent": without(SCALARS, "none") | wrong.FRACTIONS | constant(a_number=3, empty=(0.0, 0.0, 0.0, 1.0)),
        },
    ),
    method(
        "PatchGrid.from_blocks",
        grid,
        lambda: {"rows": 2, "columns": 4, "block": 2},
        **{name: COUNT | constant(zero=0) for name in ("rows", "columns", "block")},
        start=without(COUNT, "none"),
    ),
    method(
        "PatchGrid.from_tiles",
        grid,
        lambda: {"tiles": [regard.PatchGrid(2, 3, 6 * n) for n in range(4)], "columns": 2},
        tiles=OBJECT,
        columns=COUNT | constant(zero=0),
    ),
    method(
        "PatchGrid.from_windows",
        grid,
        lambda: {"rows": 2, "columns": 3, "window": 2},
        **{name: COUNT | constant(zero=0) for name in ("rows", "columns", "window")},
        shift=COUNT,
        shifts_first=SCALARS | constant(a_number=1),
    ),
    *(
        method(f"PatchGrid.{name}", grid, lambda: {"size": 7}, size=COUNT | constant(short=5))
        for name in ("find_start", "locate_tokens", "name_tokens")
    ),
    method(
        "PatchGrid.find_token",
        grid,
        lambda: {"row": 1, "column": 2, "size": 7},
        row=PLACE | wrong.LISTS,
        column=PLACE | wrong.LISTS,
        size=COUNT | constant(short=5),
    ),
    Call("AudioFrames", regard.AudioFrames, lambda: {"seconds": 0.02}, {"seconds": NUMBER | constant(zero=0, negative=-0.5)}),
    method("AudioFrames.locate_tokens", frames, lambda: {"size": 7}, size=COUNT),
    Call(
        "token_times",
        regard.token_times,
        lambda: {"recording": record_sound()},
        {
            "recording": OBJECT | constant(a_model=torch.nn.Linear(3, 3)),
            "heads": without(SCALARS, "none") | constant(a_number=3, beyond=[(9, 9)], of_numbers=[1]),
            "prompt": COUNT,
            "frames": without(COUNT, "none", "huge") | constant(zero=0),
            "median": COUNT | constant(zero=0, even=4),
            "rule": wrong.CHOICE,
        },
    ),
    Call(
        "heads",
        regard.heads,
        lambda: {"recording": record_layer(), "needle": slice(0, 2), "questions": [3, 4]},
        {
            "recording": OBJECT | constant(a_model=torch.nn.Linear(3, 3)),
            **SOUGHT,
            "layers": LAYERS,
            "tokens": TOKENS,
            "offsets": without(SCALARS, "an empty list", "a list")
            | constant(negative=[-1], of_fractions=[0.5], a_number=3, huge=[10**30]),
            "window": COUNT,
            "classes": without(SCALARS, "an empty list")
            | constant(a_number=3, of_numbers={"a": 1}, short={"a": torch.ones(2).bool()}),
            "needle": without(SLICE, "none"),
            "questions": without(INDEX, "a lone surrogate"),
            "projections": without(SCALARS, "none") | constant(a_number=3),
            "scores": OWN_SCORES,
        },
    ),
    Call(
        "atlas",
        regard.atlas,
        lambda: {
            "model": small_atlas.make_model(),
            "source": small_atlas.make_texts(1),
            "folder": folder() / "atlas",
            **small_atlas.SETTINGS,
        },
        {
            "model": OBJECT,
            "source": SCALARS | constant(a_number=3, of_numbers=[1, 2]),
            "folder": without(SCALARS, "a string") | constant(a_number=3),
            "documents": without(COUNT, "none") | constant(zero=0),
            **{name: COUNT | constant(zero=0) for name in ("tokens", "queries", "examples", "shard_size")},
            "shard": without(SCALARS, "none", "a list") | constant(a_number=3, beyond=(2, 2), of_fractions=(0.5, 2)),
            "engine": CHOICE,
            "scores": without(SCALARS, "an empty list") | constant(a_number=3, no_function=["entropy"]),
            "watch": without(SCALARS, "an object") | constant(a_number=3),
        },
    ),
    Call(
        "probe_heads",
        regard.probe_heads,
        lambda: {"model": language_model()},
        {
            "model": OBJECT | constant(a_layer=torch.nn.Linear(3, 3)),
            "vocabulary": without(COUNT, "none"),
            "begin": without(COUNT, "none") | constant(out_of_range=30),
            "context": without(COUNT, "none") | constant(zero=0),
            **{name: COUNT | constant(one=1, billions=10**10) for name in ("seeds", "length", "repeats")},
            "ablate": CHOICE,
            "by": CHOICE,
            "unembedding": without(SCALARS, "none") | constant(a_number=3, of_another_width=torch.ones(30, 3)),
            "text": without(SCALARS, "none") | constant(a_number=3, short=torch.ones(2, 1, dtype=torch.int64)),
            "watch": without(SCALARS, "an object") | constant(a_number=3),
        },
    ),
    Call(
        "effects",
        regard.effects,
        lambda: {"model": language_model(), "inputs": torch.tensor([[1, 2, 3]]), "measure": lambda logits: logits[0, -1, 0]},
        {
            "model": OBJECT,
            "inputs": {},  # the model says what it takes
            "measure": without(SCALARS, "an object") | constant(a_number=3, of_logits=lambda logits: logits),
            "heads": without(SCALARS, "an empty list") | constant(a_number=3, beyond=[(9, 9)], of_numbers=[1]),
            "by": CHOICE,
            "source": without(OBJECT, "none"),
            "path": without(PATH, "none"),
            "watch": without(SCALARS, "an object") | constant(a_number=3),
        },
    ),
    Call(
        "contributions",
        regard.contributions,
        lambda: {"model": language_model(), "tokens": torch.tensor([[1, 2, 3]]), "token": 0},
        {
            "model": OBJECT,
            "tokens": SCALARS | constant(a_number=3, of_fractions=torch.ones(1, 3), empty=torch.ones(1, 0).long()),
            **{name: without(COUNT, "none", "negative") | constant(out_of_range=10**6) for name in ("token", "other", "query")},
            "unembedding": without(SCALARS, "none") | constant(a_number=3, of_another_width=torch.ones(30, 3)),
        },
    ),
    Call(
        "find_circuits",
        regard.find_circuits,
        lambda: {"model": language_model(), "tokens": torch.tensor([[1, 2, 3]])},
        {
            "model": OBJECT,
            "tokens": SCALARS | constant(a_number=3, of_fractions=torch.ones(1, 3), one=torch.ones(1, 1).long()),
            "unembedding": without(SCALARS, "none") | constant(a_number=3, of_another_width=torch.ones(30, 3)),
        },
    ),
    Call(
        "path_effects",
        regard.path_effects,
        lambda: {
            "model": language_model(),
            "inputs": torch.tensor([[1, 2, 3]]),
            "source": torch.tensor([[1, 4, 3]]),
            "measure": lambda logits: logits[0, -1, 0],
        },
        {
            "model": OBJECT,
            "inputs": {},  # the model says what they are
            "source": constant(longer=torch.tensor([[1, 2, 3, 4]])),
            "measure": without(SCALARS, "an object") | constant(a_number=3, of_logits=lambda logits: logits),
            "receivers": without(SCALARS, "none") | constant(a_number=3, beyond=[(9, 9)], of_numbers=[1]),
            "into": CHOICE,
            "senders": without(SCALARS, "an empty list") | constant(a_number=3, beyond=[(9, 9)], of_numbers=[1]),
            "watch": without(SCALARS, "an object") | constant(a_number=3),
        },
    ),
    Call(
        "legrad",
        regard.legrad,
        lambda: {
            "model": language_model(),
            "inputs": torch.tensor([[1, 2, 3]]),
            "measure": lambda logits: logits[0, -1, 0],
        },
        {
            "model": OBJECT,
            "inputs": {},  # the model says what it takes
            "measure": without(SCALARS, "an object") | constant(a_number=3, of_logits=lambda logits: logits),
            "layers": LAYERS,
        },
    ),
    Call(
        "rollout",
        regard.rollout,
        lambda: {"recording": record_layer()},
        {
            "recording": OBJECT | constant(a_model=torch.nn.Linear(3, 3)),
            "queries": INDEX | wrong.NONE,
            "layers": LAYERS,
            "kind": without(CHOICE, "none"),
            "part": PART,
            "residual": NUMBER | constant(one=1.0, negative=-0.5),
        },
    ),
    Call(
        "compare",
        regard.compare,
        lambda: {"a": record_layer(), "b": record_layer()},
        {
            "a": OBJECT | {"a map": a_map},
            "b": OBJECT | {"a map": a_map},
            "top": SIZE,
            "queries": INDEX | wrong.NONE,
            **SOUGHT,
        },
    ),
    Call(
        "audit",
        regard.audit,
        lambda: {"recording": record_layer(), "policies": [regard.policies.Knorm(2)]},
        {
            "recording": OBJECT | constant(a_model=torch.nn.Linear(3, 3)),
            "policies": SCALARS | constant(a_number=3, of_numbers=[0.1], of_unknown_names=["h3o"]),
            "prompt": without(COUNT, "none") | constant(zero=0, beyond=6),
            "layers": without(SCALARS, "none") | constant(a_number=3, beyond=[9], of_names=["a"]),
            "certified_rows": SIZE,
            "watch": without(SCALARS, "an object") | constant(a_number=3),
        },
    ),
    Call(
        "gather_heads",
        regard.gather_heads,
        lambda: {"recording": record_layer(), "group": one_process()},
        {
            "recording": OBJECT | constant(a_model=torch.nn.Linear(3, 3)),
            "group": without(OBJECT, "none"),
        },
    ),
    Call("register_attention", regard.register_attention, dict, {}),
    Call(
        "word_heat_map",
        regard.word_heat_map,
        lambda: {"recording": record_image(), "word": 1, "size": (2, 3)},
        {
            "recording": OBJECT | constant(a_model=torch.nn.Linear(3, 3)),
            "word": PLACE | wrong.LISTS,
            "size": without(SCALARS, "a list")
            | wrong.FRACTIONS
            | constant(a_number=3, three=(2, 3, 4), zero=(0, 3), huge=(HUGE, 3), tall=(60, 2)),
            "row": PLACE | wrong.LISTS,
        },
    ),
    method("Heads.sort_by", table, lambda: {"by": "itself"}, by=CHOICE),
    method(
        "Heads.select_kind",
        table,
        lambda: {"kind": "mixed"},
        kind=without(CHOICE, "a string", "a long string", "a lone surrogate"),
    ),
    Call("Heads.__getitem__", lambda at: table()[at], lambda: {"at": 0}, {"at": PLACE | wrong.LISTS | BAD_SLICES}),
]
