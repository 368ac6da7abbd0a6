"""The layers of a recording that mix the tokens of one text, with a softmax and without, in the order they ran."""

from collections.abc import Sequence

from regard.errors import ConfigError
from regard.map.convolution import Convolution
from regard.map.linear_recurrence import LinearRecurrence
from regard.mechanism.arguments import check_index
from regard.observe.recorded_runs.part_names import describe_module, find_module_path
from regard.observe.recorded_runs.run import IMPLICIT, Run

SELF = "self"
Layer = tuple[str, int | str]  # its kind, and its number among the layers of that kind or its name


def list_token_mixers(run: Run, kind: str | None, part: str | None) -> list[tuple[str, int]]:
    """Return the layers of a kind, or with None those of self-attention with and without a softmax, in the order they ran.

    Raises ConfigError if a block has layers of both kinds, if a layer without a softmax may be cross attention, if a layer is
    one of several calls of a module, or if one does not follow the layer before it, as in another tower.
    """
    found = order_token_mixers(run, kind, part)
    check_order(run, found, part)
    return found


def order_token_mixers(run: Run, kind: str | None, part: str | None) -> list[tuple[str, int]]:
    """Return the layers of `list_token_mixers`, whether each follows the one before it or not."""
    check_modules(run.layers(kind or SELF, part))
    if kind is not None or not run.layers(IMPLICIT, part):
        known = SELF if kind is None else kind
        return [(known, number) for number in range(len(run.layers(known, part)))]
    names = {one: run.layers(one, part) for one in (SELF, IMPLICIT)}
    check_blocks(names)
    found = run.list_ordered_layers((SELF, IMPLICIT), part)
    for number, name in enumerate(names[IMPLICIT]):
        mechanism = run.map(number, kind="implicit", part=part).mechanism
        if not isinstance(mechanism, LinearRecurrence | Convolution) and not is_causal(run, number, part):
            raise ConfigError(
                f"{name} has no softmax, and whether its keys are the tokens of its queries is not recorded: pass "
                f"kind={SELF!r} for the layers with a softmax alone, or kind={IMPLICIT!r} for those without, if they are."
            )
    return found


def resolve_mixers(run: Run, layers: Sequence[int | str] | None, kind: str | None, part: str | None) -> list[Layer]:
    """Return layers, by their names or their numbers among those of list_token_mixers, or all of them."""
    known = order_token_mixers(run, kind, part)
    kinds = {one for one, _ in known}
    found: list[Layer] = [] if layers is not None else [*known]
    for layer in layers or ():
        if len(kinds) < 2:
            found.append((next(iter(kinds), SELF), layer))
        elif isinstance(layer, str):
            found.append((SELF if layer in run.layers(SELF, part) else IMPLICIT, layer))
        else:
            found.append(known[check_index("layer", layer, len(known), "the recording")])
    check_order(run, found, part)
    return found


def check_modules(names: Sequence[str]) -> None:
    """Raise ConfigError for calls of one module as layers: they may run beside each other, on other tokens or be subtracted."""
    for name in names:
        if (path := find_module_path(name)) != name:
            raise ConfigError(f"{path} calls attention several times in one forward, and how these are joined is not recorded.")


def check_order(run: Run, layers: Sequence[Layer], part: str | None) -> None:
    """Raise ConfigError if a layer is known not to read what the one before it wrote, or may be of another tower."""
    apart = run.find_gap([(kind, layer) for kind, layer in layers if kind != IMPLICIT], part)
    if apart is not None:
        advice = f"part= one of {', '.join(run.parts)}" if run.parts else "layers= of one of them, or part= its path"
        before, after = map(describe_module, apart)
        raise ConfigError(
            f"it is not known that {after} reads what {before} wrote, so their maps have no product: pass {advice}."
        )


def check_blocks(names: dict[str, list[str]]) -> None:
    """Raise ConfigError if one module, or one of a list of modules, has layers with a softmax and layers without."""
    blocks = {kind: {find_block(name) or name: name for name in found} for kind, found in names.items()}
    for block in blocks[SELF].keys() & blocks[IMPLICIT].keys():
        raise ConfigError(
            f"{blocks[SELF][block]} and {blocks[IMPLICIT][block]} are in one block, and whether they run beside each other or "
            f"in turn is not recorded: pass kind={SELF!r} for the layers with a softmax alone, or kind={IMPLICIT!r}."
        )


def find_block(name: str) -> str:
    """Return the path of the innermost module of a list that a module is in; empty if there is none."""
    path = name.split(".")
    numbers = [place for place, component in enumerate(path) if component.isdigit()]
    return ".".join(path[: numbers[-1] + 1]) if numbers else ""


def is_causal(run: Run, layer: int, part: str | None) -> bool:
    """Return whether the first query of a layer without a softmax sees its own key alone, as in a text on itself."""
    m = run.map(layer, kind="implicit", part=part)
    return m.shape[2] == m.shape[3] and not bool(m[:, :, 0, 1:].any())
