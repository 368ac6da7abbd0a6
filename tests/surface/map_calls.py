"""The calls of `regard.map`."""

from typing import Any

import torch

import regard
from regard.map import Pyramid
from surface import wrong
from surface.call import Call, method
from surface.mechanism_calls import FLOATING, OPTIONS, SIZES, K, Q
from surface.wrong import CHOICE, COUNT, HUGE, MASK, OBJECT, SCALARS, TENSOR, Wrong, constant, without

META: Wrong = {"on the meta device": lambda: torch.ones(Q, device="meta")}
SLICE = (
    SCALARS
    | wrong.FRACTIONS
    | constant(
        a_number=3,
        of_text=slice("a", "b"),
        of_fractions=slice(0.5, 2),
        without_a_step=slice(0, 3, 0),
        backwards=slice(3, 0, -1),
    )
)
BAD_SLICES = {name: SLICE[name] for name in ("of text", "of fractions", "without a step", "backwards")}
STRINGS = without(wrong.STRANGE, "a set") | constant(a_list_of_strings=["a"], a_dict={"a": 1})
INDEX = (
    STRINGS
    | wrong.FRACTIONS
    | BAD_SLICES
    | {name: make for name, make in wrong.DTYPES.items() if name not in ("an int tensor", "a bool tensor")}
    | constant(a_flag=True, out_of_range=7, before_the_first=-8, far_away=[HUGE], in_a_list=[0, 7], huge=HUGE)
    | {
        "in a tensor": lambda: torch.tensor([0, 7]),
        "bools": lambda: torch.tensor([True] * 9),
        "of floats": lambda: torch.ones(2),
    }
)
SIZE = COUNT | SIZES


def a_map() -> regard.AttentionMap:
    torch.manual_seed(0)
    return regard.AttentionMap(torch.randn(Q), torch.randn(K), regard.Causal())


def index(made: Any, at: Any) -> Any:
    return made[at]


def product(made: Any, other: Any) -> Any:
    return made @ other


BINS = {"rows": SIZE | constant(too_many=10**9), "columns": SIZE | constant(too_many=10**9), "how": CHOICE}
PLACE = COUNT | constant(out_of_range=99)
FROM_THE_END = without(PLACE, "negative") | constant(before_the_first=-3)
CALLS = [
    Call(
        "AttentionMap",
        regard.AttentionMap,
        lambda: {"q": torch.randn(Q), "k": torch.randn(K)},
        {"q": TENSOR | META, "k": TENSOR | META, **OPTIONS, "weight": without(TENSOR, "none", "another width") | META},
    ),
    Call("AttentionMap.__getitem__", index, lambda: {"made": a_map(), "at": 0}, {"at": INDEX | wrong.NONE, "made": {}}),
    method("AttentionMap.__len__", a_map, dict),
    method("AttentionMap.__iter__", a_map, dict),
    method("AttentionMap.__bool__", a_map, dict),
    method(
        "AttentionMap.select",
        a_map,
        lambda: {"batch": 0, "heads": [0, 1]},
        batch=INDEX | wrong.NONE,
        heads=INDEX | wrong.NONE,
    ),
    *(method(f"AttentionMap.{name}", a_map, dict) for name in ("logsumexp", "entropy", "received", "overview")),
    method("AttentionMap.mass", a_map, lambda: {"keys": slice(0, 3)}, keys=INDEX | wrong.NONE),
    method("AttentionMap.diagonal", a_map, dict, back=without(COUNT, "negative")),
    method("AttentionMap.top", a_map, lambda: {"n": 2}, n=SIZE | constant(more_than_keys=8)),
    method("AttentionMap.pooled", a_map, lambda: {"rows": 2, "columns": 3}, **BINS),
    method(
        "AttentionMap.tile",
        a_map,
        lambda: {"rows": slice(1, 4), "columns": slice(None), "size": 2},
        rows=SLICE,
        columns=SLICE,
        size=without(SIZE, "a list") | constant(three=(1, 2, 3), one=(1,), of_text=("a", 2), too_many=10**9, of_none=(None, 1)),
        how=CHOICE,
    ),
    Call("AttentionMap.__matmul__", product, lambda: {"made": a_map(), "other": torch.ones(K)}, {"other": TENSOR, "made": {}}),
    Call(
        "Transposed.__matmul__",
        product,
        lambda: {"made": a_map().mT, "other": torch.ones(Q)},
        {"other": without(TENSOR, "another width"), "made": {}},
    ),
    method(
        "AttentionMap.dense",
        a_map,
        dict,
        limit_bytes=without(FLOATING, "a fraction", "infinity", "a fraction below 1") | constant(few=10),
    ),
    method("AttentionMap.certificate", a_map, dict, rows=SIZE),
    Call(
        "load_paged_maps",
        regard.load_paged_maps,
        lambda: {
            "q": torch.ones(1, 2, 4),
            "pages": torch.ones(3, 2, 1, 4),
            "block_tables": torch.tensor([[2, 0]]),
            "lengths": torch.tensor([3]),
        },
        {
            "q": TENSOR,
            "pages": TENSOR,
            "block_tables": TENSOR | {"out of range": lambda: torch.tensor([[2, 7]]), "too few": lambda: torch.tensor([[2]])},
            "lengths": TENSOR | {"negative": lambda: torch.tensor([-1]), "beyond the blocks": lambda: torch.tensor([9])},
            "query_starts": without(TENSOR, "none") | {"backwards": lambda: torch.tensor([1, 0])},
            "mask": MASK,
            "layout": CHOICE,
            "scores": {},  # those of AttentionMap
        },
    ),
    Call("map.Pyramid", Pyramid, lambda: {"m": a_map()}, {"m": OBJECT, "batch": FROM_THE_END, "head": FROM_THE_END}),
    *(
        method(
            f"Pyramid.{name}",
            lambda: Pyramid(a_map()),
            lambda: {"level": 0, "row": 0, "column": 0},
            level=PLACE,
            row=PLACE,
            column=PLACE,
            how=CHOICE,
        )
        for name in ("tile", "codes")
    ),
    method("Pyramid.shape", lambda: Pyramid(a_map()), lambda: {"level": 0}, level=PLACE),
    method("Pyramid.iterate_strips", lambda: Pyramid(a_map()), dict),
]
