"""Scans over tokens that no map was read from: running sums of tokens over decays, times these decays."""

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.products.score_form import QUOTIENTS
from regard.observe.interception.handwritten.softmax.divided_exponentials import EXPONENTIALS
from regard.observe.interception.handwritten.unread.unread_loops import MOVES, TokenAxis, runs_along_tokens
from regard.observe.interception.lookups import RUNNING
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation

DIFFERENCES = {"sub", "subtract"}
Signs = dict[int, int]  # by the id of a tensor


def sums_decayed_tokens(frame: ModuleFrame, operations: list[Operation], tokens: TokenAxis) -> bool:
    """Return whether operations sum up tokens over decays and multiply by these, or do so with the logarithms of all.

    Decays are running products of tokens, or exponentials of running sums. The sign of a tensor is -1 if it has been divided by
    decays, or has the negative of their logarithms.
    """
    logs, decays, log_terms, terms, log_sums, sums = kinds = tuple[Signs, ...](Signs() for _ in range(6))
    for operation in operations:
        role, core, given = infer_role(operation.name), strip_affixes(operation.name), operation.given
        if operation.child is not None or not given:
            continue
        first = id(given[0])
        made: Signs | None = None
        sign = 0
        if core in RUNNING:
            if runs_along_tokens(operation, tokens) and frame.find_contents(given[0]) == TOKEN:
                if core == "cumprod":
                    made, sign = decays, 1
                elif core == "logcumsumexp":
                    made, sign = log_sums, log_terms.get(first, 0)
                else:
                    made, sign = (sums, terms[first]) if first in terms else (logs, 1)
        elif core in EXPONENTIALS or core == "neg":
            made, sign = (decays, logs.get(first, 0)) if core in EXPONENTIALS else (logs, -logs.get(first, 0))
        elif role in (Role.MULTIPLY, Role.ADD) and len(given) == 2:
            known, results, ends = (decays, terms, sums) if role is Role.MULTIPLY else (logs, log_terms, log_sums)
            for x, other, flip in list_operands(core, given):
                found = flip * (known.get(id(x)) or results.get(id(x), 0))
                if found and ends.get(id(other)) == -found:
                    return True
                if found and id(other) not in known:
                    made, sign = results, found
        elif role is Role.ADD and first in decays:  # and a number that keeps what is divided by them finite
            made, sign = decays, decays[first]
        elif core in MOVES:
            made = next((kind for kind in kinds if first in kind), None)
            sign = 0 if made is None else made[first]
        if made is not None and sign:
            made.update((id(y), sign) for y in operation.results)
    return False


def list_operands(core: str, given: list[TensorRef]) -> list[tuple[TensorRef, TensorRef, int]]:
    """Return each of two operands with the other one, and -1 for what is subtracted or divided by."""
    flip = -1 if core in DIFFERENCES | QUOTIENTS else 1
    return [(given[0], given[1], 1), (given[1], given[0], flip)]
