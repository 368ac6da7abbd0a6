"""Who may see whom in each attention layer of a module: one rule for all, or rules by patterns of their names."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from regard.errors import ConfigError
from regard.examination import mask_requirements
from regard.mechanism import Mask
from regard.mechanism.arguments import describe_value
from regard.mechanism.mask_algebra import check_mask

Expectation = Mask | Mapping[str, Mask]
ALL = "*"
EXAMPLE = 'expects={"*.0.*": Causal() & Window(128), "*": Causal()}'


@dataclass(frozen=True)
class LayerRules:
    """Rules by patterns of the paths of attention layers, as of fnmatch; the first pattern that matches a path counts."""

    patterns: tuple[tuple[str, Mask], ...]

    @property
    def single(self) -> Mask | None:
        """The rule of all layers; None if there are several."""
        return self.patterns[0][1] if [pattern for pattern, _ in self.patterns] == [ALL] else None

    @property
    def masks(self) -> list[Mask]:
        """The rules without repeats."""
        return list(dict.fromkeys(rule for _, rule in self.patterns))

    @property
    def is_batch_specific(self) -> bool:
        """Whether a rule fits one batch only: its padding, its documents, its table."""
        return any(rule.is_batch_specific for rule in self.masks)

    @property
    def key_count(self) -> int | None:
        """The only number of keys that the rules fit; None if they fit any."""
        return next((rule.key_count for rule in self.masks if rule.key_count is not None), None)

    @property
    def required_tokens(self) -> int:
        """The least number of keys that shows each rule."""
        return max(mask_requirements.count_required_tokens(rule) for rule in self.masks)

    def get_rule(self, name: str) -> Mask:
        """Return the rule of a layer. Raises ConfigError if no pattern matches its path."""
        for pattern, rule in self.patterns:
            if fnmatchcase(name, pattern):
                return rule
        raise ConfigError(f"no pattern of expects matches the attention layer {name!r}. Add one, or the pattern {ALL!r}.")

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ConfigError if a layer has no rule, or if a pattern is the first match of no layer."""
        if self.single is not None:
            return
        names = list(dict.fromkeys(names))
        firsts = [next((one for one, _ in self.patterns if fnmatchcase(name, one)), None) for name in names]
        layers = f"The attention layers are: {', '.join(names) or 'none'}."
        without = [name for name, first in zip(names, firsts, strict=True) if first is None]
        if without:
            raise ConfigError(f"no pattern of expects matches {', '.join(without)}. Add one, or the pattern {ALL!r}. {layers}")
        for pattern, _ in self.patterns:
            if pattern not in firsts:
                is_late = any(fnmatchcase(name, pattern) for name in names)
                why = "comes after others that match its layers: put it first" if is_late else "matches no attention layer"
                raise ConfigError(f"the pattern {pattern!r} of expects {why}. {layers}")

    def __str__(self) -> str:
        if self.single is not None:
            return str(self.single)
        return ", ".join(f"{pattern}: {rule}" for pattern, rule in self.patterns)


def make_layer_rules(expects: Expectation) -> LayerRules:
    """Return the rules that `expects` states. Raises ConfigError if it is neither a mask nor a mapping of patterns to masks."""
    if not isinstance(expects, Mapping):
        return LayerRules(((ALL, check_mask(expects)),))
    if not expects or not all(isinstance(pattern, str) for pattern in expects):
        raise ConfigError(f"expects maps patterns of layer names to masks, as {EXAMPLE}; got {describe_value(expects)}.")
    return LayerRules(tuple((pattern, check_mask(rule)) for pattern, rule in expects.items()))
