"""Check the rest of who sees whom, besides future and padding: an inverted mask, one off, the own token left out."""

from collections.abc import Iterator

from torch import Tensor

from regard.examination import dependency, evidence, mask_requirements
from regard.examination.case import Case
from regard.examination.probes import future, padding
from regard.examination.report import Checked, Finding, Unknown

INVERT = (
    "The mask is inverted: it hides the keys that should be visible. True means visible in F.scaled_dot_product_attention and "
    "in scores.masked_fill(~mask, -torch.inf), but hidden in nn.MultiheadAttention and nn.Transformer: pass ~mask to these."
)
SELF = "Let each query see its own token: hide with triu(diagonal=1), not triu(diagonal=0); keep tril(diagonal=0)."
BOUND = "Fix the bound of the mask: for query i and key j, the visible pairs are"
OWN = "whether a query sees its own token in the attention itself"
ALONE = (
    "If the module contains attention, its mask or its axes separate all tokens: scores are q @ k.transpose(-2, -1), of shape "
    "(q, k)."
)
LESS = "Hide no more than the expected mask does: set only the scores of keys that it hides to -inf."


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Check what is seen and should not be, other than by future and padding, and what is not seen and should be."""
    if evidence.has_no_dependency(case):
        if case.measured_dependency.measured_rows.any():
            what = "which tokens each query sees: no output depends on any token"
            yield Unknown(what, "a layer whose weights are not zero", is_required=True)
        return
    table = VisibilityComparison(case)
    if not mask_requirements.is_shown(case.expects, case.shapes.tokens):
        yield mask_requirements.describe_short_sample(case.expects, case.shapes.tokens)
    if table.is_inverted:
        yield report_inverted_mask(case, table)
    elif table.extra.any() or (table.missing.any() and not table.padding_seen):
        yield report_wrong_mask(case, table)  # the padding probe reports tokens hidden instead of padding
    elif table.judged.any():
        yield Checked(f"every query sees all tokens that {case.expects} allows", evidence.describe_sensitivity(case))
    if case.subject.form == "x" and not table.own_is_plain and not table.missing.any() and case.match is None:
        yield Unknown(OWN, evidence.ALONE)


class VisibilityComparison:
    """What is found next to what is expected, (b, q, k), in the rows that can be judged."""

    def __init__(self, case: Case) -> None:
        self.expected, self.found = case.get_expected_visibility(*case.make_usual_inputs()), case.measured_dependency.visible
        b, q, k = self.expected.shape
        self.own = mask_requirements.make_own_table(q, k, case.offset).expand(b, q, k)
        rows = (
            case.measured_dependency.measured_rows.unsqueeze(-1)
            & self.expected.any(-1, keepdim=True)
            & mask_requirements.find_real_queries(case.expects, b, q, k)
        )
        self.judged = rows.expand(b, q, k)
        self.own_is_plain = (
            case.subject.form == "qkv"
            or case.measured_dependency.passes_own_value is not None
            or not (self.own & self.judged & self.found).any()
        )
        itself = (self.expected & self.own).any(-1) & (self.expected.sum(-1) > 1)  # else no such query was measured
        unseen = (
            ~self.found | self.own if case.measured_dependency.passes_own_value is False and itself.any() else ~self.found
        )  # seen only as the query
        self.missing = self.judged & self.expected & unseen
        padded = padding.find_padded_keys(case, b, q, k)
        self.padding_seen = bool((padded & self.judged & self.found).any())
        elsewhere = future.find_hidden_future(case) | padded
        extra = self.judged & ~self.expected & self.found & ~elsewhere
        self.extra = extra if case.subject.form == "qkv" else extra & ~(self.own & ~find_passed_tokens(case, extra & self.own))

    @property
    def is_inverted(self) -> bool:
        """Whether what is found is the opposite of the rule, or the rule with queries and keys exchanged."""
        rows = self.judged & (~self.own if not self.own_is_plain or (self.own & self.found).any() else self.judged)
        turned = [~self.expected]
        if self.expected.shape[-1] == self.expected.shape[-2]:
            turned.append(self.expected.mT)
        return any(self._is_table(table, rows & table.any(-1, keepdim=True)) for table in turned)  # blind rows may be uniform

    def _is_table(self, table: Tensor, rows: Tensor) -> bool:
        """Return whether another table is what is found in these entries, and differs from the rule there both ways."""
        differs = (table != self.expected) & rows
        return bool(((self.found == table) | ~rows).all() and (differs & table).any() and (differs & ~table).any())


def find_passed_tokens(case: Case, own: Tensor) -> Tensor:
    """Return the own tokens (b, q, k) that may not be seen and whose value is passed on, not only their query."""
    passed = own & False
    if case.measured_dependency.passes_own_value is not None:
        best = case.double or case
        for b, i, j in own.nonzero().tolist():
            passed[b, i, j] = dependency.can_pass_own_value(best.compute_context, best.make_usual_inputs, b, i) is True
    return passed


def report_inverted_mask(case: Case, table: VisibilityComparison) -> Finding:
    """Return the finding of an inverted mask."""
    wrong = table.judged & (table.found != table.expected) & ~table.own
    b = int(wrong.any(-1).any(-1).int().argmax())
    telling = wrong & table.missing if (wrong & table.missing)[b].any() else wrong
    i = int(telling[b].any(-1).int().argmax())
    sees = [int(j) for j in table.found[b, i].nonzero().flatten()]
    may = [int(j) for j in table.expected[b, i].nonzero().flatten()]
    evidence = f"query {i} sees token{format_plural(sees)}, but should see token{format_plural(may)}: the mask is inverted"
    return Finding("inverted mask", evidence, INVERT, strength=1.3, cause="mask")


def report_wrong_mask(case: Case, table: VisibilityComparison) -> Finding:
    """Return the finding of any other wrong mask, with the name of the rule that was found if it has one."""
    cause, strength = (
        ("batch", 0.8)
        if (case.measured_dependency.across_sequences > case.measured_dependency.threshold).any()
        else ("mask", 0.9)
    )
    missing, extra = table.missing, table.extra
    if not extra.any() and not (missing & ~table.own).any() and int(missing.sum()) > 1:
        b, i, j = (int(n) for n in missing.nonzero()[0])
        sentence = f"query {i} does not see its own token {evidence.format_token(case, j)}: its value does not reach output {i}"
        return Finding("wrong mask", sentence, SELF, strength + 0.25, cause)  # ranks above the blind first row that it causes
    if missing.any() and not (table.found & table.judged & ~table.own).any():
        pairs = int(missing.sum((1, 2)).max())
        counted = f"{pairs} pair{'s' * (pairs != 1)} of different tokens"
        sentence = f"no output depends on any token but its own, but {case.expects} allows {counted}"
        return Finding("wrong mask", sentence, ALONE, strength, cause)
    b, i, j = (int(n) for n in (extra if extra.any() else missing).nonzero()[0])
    if extra.any():
        sentence = f"{evidence.describe_dependency(case, i, j, b)}, which it may not see"
    else:
        sentence = f"query {i} may see token {evidence.format_token(case, j)}, but changing it does not move output {i}"
        sentence += f"; the same for {int(missing[b].sum())} of {int((table.expected & table.judged)[b].sum())} pairs"
    judged = table.judged if table.own_is_plain else table.judged & ~table.own
    named = mask_requirements.infer_mask(table.found, judged, case.expects, case.offset)
    if named is None:
        return Finding("wrong mask", sentence, LESS, strength, cause)
    sentence += f". The measured mask is {named}, not {case.expects}"
    return Finding("wrong mask", sentence, f"{BOUND} {case.expects.condition}.", strength, cause)


def format_plural(numbers: list[int]) -> str:
    """Format numbers after a noun: ` 0`, or `s 0 and 3`."""
    return f"{'s' * (len(numbers) > 1)} {evidence.format_numbers(numbers)}" if numbers else "s (none)"
