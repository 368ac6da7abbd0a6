"""parse_policy: a policy from text, such as "snapkv:budget=0.1,window=32"."""

import ast
from dataclasses import fields

from regard.errors import ConfigError, MissingNameError
from regard.mechanism.arguments import check_instance
from regard.policies.eviction import H2O, TOVA
from regard.policies.policy import Policy
from regard.policies.prompt_policies import ExpectedAttention, Knorm, ObservedAttention, SnapKV
from regard.policies.quantised import Quantised
from regard.policies.query_policies import BlockSparse, Oracle, Quest, VerticalSlash
from regard.policies.streaming import DuoAttention, StreamingLLM

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
