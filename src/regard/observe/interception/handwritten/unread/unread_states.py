"""States of several sequences that a loop takes and writes by an index, as of packed sequences in step: no map is read of them.

Each step then makes a tensor of states that no other is a view of, so that it is followed as a loop of a single token.
"""

from collections.abc import Sequence

from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.recurrences.state_loop import MIN_TOKENS
from regard.observe.interception.provenance import ModuleFrame

INDEXED = "it takes the states of its loop by an index, as of packed sequences, and writes them back, which is not followed"


def takes_states_by_index(frame: ModuleFrame, states: Sequence[TensorRef]) -> bool:
    """Return whether a loop of a module takes states by an index, adds products of keys with values, and reads each of them.

    The states are those that such products were added to, one of each step.
    """
    written, steps, reads = {*map(id, states)}, 0, 0
    made, picked, taken = set[int](), set[int](), set[int]()  # of states, by an index of these, and of what was picked
    for one in frame.list_operations() if len(states) >= MIN_TOKENS else ():
        given, results = {*map(id, one.given)}, {*map(id, one.results)}
        if one.lookup is not None and id(one.given[0]) in made:
            picked |= results
        is_product = one.child is None and infer_role(one.name) is Role.PRODUCT
        reads += is_product and not given.isdisjoint(written | picked)
        steps += not results.isdisjoint(written) and not given.isdisjoint(picked | taken)
        taken |= results if not given.isdisjoint(picked | taken) else set()
        made |= results if not (given.isdisjoint(made) and results.isdisjoint(written)) else set()
    return steps >= MIN_TOKENS - 1 and reads >= MIN_TOKENS
