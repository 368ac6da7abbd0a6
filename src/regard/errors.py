"""What can go wrong through what a caller passed in; caught once, at the door."""


class RegardError(Exception):
    """The root of every error regard raises on purpose."""


class ShapeError(RegardError, ValueError):
    """Tensors whose axes do not agree."""


class ConfigError(RegardError, ValueError):
    """A setting outside what is possible."""


class WeightsError(RegardError):
    """A file of weights that is incomplete, damaged or of another model."""


class DataError(RegardError):
    """A text, table or recording that cannot be read as what it should be."""


class TooLargeError(RegardError):
    """An answer larger than the limit on memory."""
