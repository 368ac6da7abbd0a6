"""Every public name, each parameter of it, with what is wrong: refused in one sentence of our own, at once."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest

import regard
from regard import errors, evaluate, layers, mechanism, observe
from regard import map as maps
from surface import evaluate_calls, layer_calls, map_calls, mechanism_calls, model_calls, observe_calls
from surface.call import Call

CALLS = [
    *mechanism_calls.CALLS,
    *layer_calls.CALLS,
    *map_calls.CALLS,
    *observe_calls.CALLS,
    *model_calls.CALLS,
    *evaluate_calls.CALLS,
]
BY_NAME = {call.name: call for call in CALLS}
LONGEST_MESSAGE = 500
LONGEST_SECONDS = 60  # far beyond any machine's time for one of these, far below that of a hang
BLOCKING = {"serve"}  # which serves until it is stopped
SLOW = {"path_effects", "probe_heads"}  # which run their model before they can tell
RESULTS = {
    "Certificate",
    "Finding",
    "Overview",
    "Lambada",
    "Perplexity",
    "PublishedFigure",
    "Report",
    "Run",
    "Steps",
    "Transposed",
    "Call",
    "Mask",
    "Recording",
}  # made by us
NOT_CALLED_BY_USERS = {  # methods of public classes that other code of ours calls, or torch; they are handed what was checked
    "AttentionMap.draw_picture",
    "AdditiveAttention.arrange_inputs",
    "AdditiveAttention.attend_projected",
    "AdditiveAttention.project",
    "GPT2.check_tokens",
    "GPT2.get_end_settings",
    "GPT2.init_weights",
    "GPT2.reading",
    "GPT2Config.describe",
    "GPT2Config.multiply_adds",
    "StackedHeads.project",
    "Recording.describe_missed",
    *(
        f"{mask}.{name}"
        for mask in mechanism_calls.MASKS
        for name in (
            "block",
            "check",
            "find_possible_keys",
            "find_certain_keys",
            "can_see",
            "find_key_ranges",
            "find_key_ends",
            "from_arguments",
            "transform_parts",
            "truncate",
            "for_keys",
            "select_heads",
            "remove_padding",
        )
    ),
    "Documents.select_ids",
    "Given.select_rows",
    "Given.from_shared_table",
    *(
        f"{change}.{name}"
        for change in ("CutEdges", "KnockOut", "Patch", "Temperature")
        for name in (
            "change_context",
            "change_call",
            "change_weights",
            "compute_context",
            "depends_on_row_scale",
            "find_heads",
            "resolve_heads",
        )
    ),
    *(f"{change}.is_target" for change in ("CutEdges", "KnockOut", "Patch", "Temperature")),
    "KnockOut.make_replacement",
    *(f"Patch.{name}" for name in ("change_residual", "find_block", "mark_queries")),
    *(
        f"DifferentiableMap.{name}"
        for name in ("apply_to_planes", "gather_from_rows", "iterate_blocks", "join_blocks", "list_planes", "run_block")
    ),
    "Temperature.change_additive_call",
}
PACKAGES = {"": regard, "mechanism.": mechanism, "map.": maps, "layers.": layers, "observe.": observe, "evaluate.": evaluate}
FORMULA_MODULES = {  # modules of formulas
    f"mechanism.{name}": getattr(mechanism, name) for name in ("heads", "positions", "scores", "softmax")
}
NOT_FORMULAS = {
    "evaluate.list_published",  # of what is not among them it gives nothing
    "evaluate.stop_tokens",
    "mechanism.heads.describe_indivisible_width",
    "mechanism.positions.rotation_frequencies",
    "mechanism.scores.score_dtype",
    "mechanism.scores.default_scale",
}


def public_callables() -> dict[str, Callable[..., Any]]:
    """Every public function and class by its shortest name, and every method that such a class has of ours."""
    found: dict[str, Any] = {}
    for prefix, package in PACKAGES.items():
        for name in package.__all__:
            value = getattr(package, name)
            if callable(value) and value not in found.values():
                found[prefix + name] = value
    for prefix, module in FORMULA_MODULES.items():
        ours = inspect.getmembers(module, lambda value, module=module: inspect.getmodule(value) is module and callable(value))
        found |= {f"{prefix}.{name}": value for name, value in ours if not name.startswith("check_")}
    for value in [value for value in found.values() if inspect.isclass(value)]:
        found |= {f"{value.__name__}.{name}": method for name, method in methods(value)}
    return found


def methods(owner: type) -> list[tuple[str, Callable[..., Any]]]:
    """The public methods of a class that code of ours defines."""
    ours = [base for base in owner.__mro__ if base.__module__.startswith("regard")]
    names = {name for base in ours for name in vars(base) if not name.startswith("_")}
    return [(name, getattr(owner, name)) for name in sorted(names) if inspect.isroutine(getattr(owner, name))]


def is_exempt(name: str, value: Any) -> bool:
    """Return whether a name is an error, a result that only we make, or not for users."""
    is_error = inspect.isclass(value) and issubclass(value, errors.RegardError)
    is_of_a_result = name.rsplit(".", 1)[0] in RESULTS - {"Recording"}
    return is_error or is_of_a_result or name.split(".")[-1] in RESULTS or name in NOT_CALLED_BY_USERS | NOT_FORMULAS


def test_every_public_name_is_tested_here():
    missing = [name for name, value in public_callables().items() if name not in BY_NAME and not is_exempt(name, value)]
    assert missing == [], "add each to tests/surface, with what its parameters must refuse"


@pytest.mark.parametrize("name", [name for name in public_callables() if name in BY_NAME])
def test_every_parameter_of_a_public_name_is_tested_here(name):
    taken = set(inspect.signature(public_callables()[name]).parameters) - {"self", "args", "kwargs", "settings"}
    known = set(BY_NAME[name].refuses)
    assert taken <= known, f"{name} takes {taken - known}: say in tests/surface what these must refuse"


def cases() -> list[Any]:
    return [
        pytest.param(call, parameter, id=f"{call.name}({parameter})", marks=[pytest.mark.slow] if call.name in SLOW else [])
        for call in CALLS
        for parameter, refused in call.refuses.items()
        if refused
    ]


@pytest.mark.parametrize("call", [call for call in CALLS if call.name not in BLOCKING], ids=lambda call: call.name)
def test_the_arguments_that_are_changed_here_work_as_they_are(call: Call):
    call.run()


@pytest.mark.filterwarnings("ignore:.*(quantize_per_tensor|nested tensors|Sparse).*")
@pytest.mark.parametrize(("call", "parameter"), cases())
def test_what_is_wrong_is_refused_in_one_sentence_of_our_own(call: Call, parameter: str):
    faults = []
    for what, make in call.refuses[parameter].items():
        began = time.monotonic()
        try:
            call.run(**{parameter: make()})
            faults.append(f"{what} is taken")
        except errors.RegardError as error:
            message = str(error)
            if not message or len(message) > LONGEST_MESSAGE or not message.rstrip().endswith((".", "?")):
                faults.append(f"{what} gives {message!r}")
        except Exception as error:
            faults.append(f"{what} gives {type(error).__name__}: {str(error)[:100]}")
        if time.monotonic() - began > LONGEST_SECONDS:
            faults.append(f"{what} takes {time.monotonic() - began:.0f} s")
    assert faults == []
