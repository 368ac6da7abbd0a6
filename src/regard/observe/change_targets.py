"""Which layers the changes of an intervention are about, by number or by path."""

from collections.abc import Sequence

from regard.errors import ConfigError
from regard.observe.attention_changes import Change
from regard.observe.recorded_runs.layer_numbers import LayerNumbers, LayerPlace


class ChangeTargets:
    """The layers that the changes of an intervention are about, and what their numbers have been so far."""

    def __init__(self, layer_numbers: LayerNumbers, requested_changes: Sequence[Change]) -> None:
        self.layer_numbers, self.requested_changes = layer_numbers, requested_changes
        self.numbered: dict[Change, LayerPlace] = {}  # the layer that the number of a change meant
        self.numbers: dict[tuple[str, str, int], set[int | None]] = {}  # of layers, by kind, module and visit

    def select_changes(self, place: LayerPlace, kind: str) -> list[Change]:
        """Return the changes of a layer, without patches of the residual stream.

        Raises ConfigError if the number of a change means this layer and another one, as in an encoder and a decoder.
        """
        numbers = self.numbers.setdefault((kind, place.name, place.visit), set())
        numbers.add(place.number)
        for change in (one for one in self.requested_changes if type(one.layer) is int and one.kind == kind):
            self.check_number(change, place, numbers)
        return [change for change in self.requested_changes if change.is_target(place.name, place.number, kind)]

    def check_number(self, change: Change, place: LayerPlace, numbers: set[int | None]) -> None:
        """Raise ConfigError if a layer has the number of a change, and another number, or another layer has it too."""
        number, other = change.layer, self.numbered.get(change)
        if other is not None and place.number == number and other[:2] != place[:2]:
            raise ConfigError(
                f"layer {number} is both {other.describe()} and {place.describe()}: pass the path of one, as in "
                f"layer={place.name!r}."
            )
        if other is not None and not self.layer_numbers.is_numbered(other.name):
            raise ConfigError(
                f"layer {number} was {other.describe()}, but the numbers are those of {self.layer_numbers.default_part}, as in "
                f"recording.map: pass its path, layer={other.name!r}."
            )
        if number in numbers and len(numbers) > 1:
            said = " and ".join(map(str, sorted(one for one in numbers if one is not None)))
            raise ConfigError(
                f"layer {number} depends on the forward: {place.describe()} has been number {said}. Pass the path of one, as "
                f"in layer={place.name!r}."
            )

    def note_applied(self, change: Change, place: LayerPlace) -> None:
        """Note which layer the number of a change has meant."""
        if isinstance(change.layer, int):
            self.numbered.setdefault(change, place)
