"""Scans over tokens that no map was read from: all states of a recurrence at once, found in the operations of a module."""

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestor_search import REPEATS, TensorRef
from regard.observe.interception.handwritten.divided_exponentials import EXPONENTIALS
from regard.observe.interception.handwritten.unread_loops import MOVES, is_pick
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation

RUNNING = {"cumsum", "cumprod", "logcumsumexp"}
MIN_ROUNDS = 2  # of a scan by doubling


def sums_decayed_tokens(frame: ModuleFrame, operations: list[Operation]) -> bool:
    """Return whether operations add up tokens with decays that running sums of logarithms, or running products, make of tokens.

    Running sums of tokens over decays are multiplied by these again, or a product has a decay for each pair of tokens. The sets
    hold the ids of running sums of decayed tokens, of decays of pairs, of decays, of their logarithms, and of copies.
    """
    sums, pairs, decays, logs, repeated = (set[int]() for _ in range(5))
    for name, child, given, sizes, results, *_ in operations:
        role, core, ids = infer_role(name), strip_affixes(name), {*map(id, given)}
        made: set[int] | None = None
        if child is not None or not given:
            continue
        if core in RUNNING:
            if frame.find_contents(given[0]) == TOKEN:
                if core == "logcumsumexp":
                    return True
                of_logs = pairs if ids & repeated else logs
                made = sums if ids & decays else decays if core == "cumprod" else of_logs
        elif role is Role.PRODUCT:
            if ids & pairs and len(ids) > 1:
                return True
            made = pairs if len(ids & decays) > 1 else None
        elif role is Role.MULTIPLY and ids & sums and ids & decays:
            return True
        elif core in EXPONENTIALS:
            made = pairs if ids & pairs else decays if ids & logs else None
        elif role is Role.ADD and len(given) == 2 and ids <= logs and len(ids) == 2 and sizes[0] == sizes[1]:
            made = pairs
        elif role in (Role.MULTIPLY, Role.ADD) or core in MOVES | {"neg"}:
            made = next((one for one in (sums, pairs, decays, logs, repeated) if ids & one), None)
            made = repeated if made is None and core in REPEATS else made
        if made is not None:
            made |= {*map(id, results)}
    return False


def combines_neighbors(frame: ModuleFrame, operations: list[Operation]) -> bool:
    """Return whether operations combine states with their neighbors in several rounds, as an associative scan does.

    Each adds to a part of the states another part times a part of the decays, and multiplies parts of the decays.
    """
    roots: dict[int, TensorRef] = {}  # of what parts were picked from, by the id of the part
    products: dict[int, tuple[TensorRef, TensorRef]] = {}  # what parts of two tensors a product has, by the id of the product
    squared, rounds = set[int](), list[TensorRef]()
    for name, child, given, _, results, *_ in operations:
        role, core = infer_role(name), strip_affixes(name)
        if child is not None or not given:
            continue
        parts = [roots[id(x)] for x in given if id(x) in roots]
        if role is Role.MULTIPLY and len(parts) == len(given) == 2 and given[0] is not given[1]:
            if parts[0] is parts[1]:
                squared.add(id(parts[0]))
            else:
                products |= {id(y): (parts[0], parts[1]) for y in results}
        elif role is Role.ADD and len(given) == 2 and len(parts) == 1:
            factors = next((products[id(x)] for x in given if id(x) in products), ())
            rounds += [x for x in factors if any(parts[0] is one for one in factors) and x is not parts[0]]
        elif core in MOVES:
            root = roots.get(id(given[0]), given[0])
            is_part = is_pick(name) or id(given[0]) in roots
            roots |= {id(y): root for y in results if y is not given[0]} if is_part else {}
    return sum(id(x) in squared and frame.find_contents(x) == TOKEN for x in rounds) >= MIN_ROUNDS
