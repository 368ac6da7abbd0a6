"""parse_policy: a policy from text, such as "snapkv:budget=0.1,window=32"; list_policies: several, of text or values."""

import ast
from collections.abc import Sequence
from dataclasses import fields

from regard.errors import ConfigError, MissingNameError
from regard.mechanism.arguments import check_instance, check_sequence
from regard.policies.eviction import H2O, TOVA
from regard.policies.policy import Policy, check_policy
from regard.policies.prompt_policies import ExpectedAttention, Knorm, ObservedAttention, SnapKV
from regard.policies.quantised import Quantised
from regard.policies.query_policies import BlockSparse, Oracle, Quest, VerticalSlash
from regard.policies.streaming import DuoAttention, StreamingLLM

Policies = str | Policy | Sequence[str | Policy]
POLICIES: tuple[type[Policy], ...] = (
    StreamingLLM,
    H2O,
    TOVA,
    SnapKV,
    ObservedAttention,
    Knorm,
    ExpectedAttention,
    Quest,
    BlockSparse,
    VerticalSlash,
    DuoAttention,
    Quantised,
    Oracle,
)


def parse_policy(text: str) -> Policy:
    """Return the policy that a text names, with its arguments: "h2o", "snapkv:budget=0.1,window=32".

    Raises ConfigError for a text of another form, MissingNameError for an unknown policy or argument.
    """
    name, _, rest = check_instance("a policy", text, str).partition(":")
    found = next((one for one in POLICIES if one.__name__.lower() == name.strip().lower()), None)
    if found is None:
        raise MissingNameError(
            f"there is no policy {name!r}; the policies are {', '.join(one.__name__.lower() for one in POLICIES)}."
        )
    try:
        call = ast.parse(f"f({rest})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(rest)
        given = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError):
        raise ConfigError(
            f"a policy is its name and arguments as in snapkv:budget=0.1,window=32; {rest!r} are no such arguments."
        ) from None
    known = [one.name for one in fields(found)]
    for argument in given:
        if argument not in known:
            raise MissingNameError(f"{found.__name__} has no argument {argument!r}; its arguments are {', '.join(known)}.")
    return found(**given)


def list_policies(policies: Policies) -> list[Policy]:
    """Return one policy or several, each a value or text that `parse_policy` takes, as a list.

    Raises ConfigError for anything else.
    """
    given = [policies] if isinstance(policies, (str, Policy)) else check_sequence("policies", policies)
    return [parse_policy(one) if isinstance(one, str) else check_policy(one) for one in given]
