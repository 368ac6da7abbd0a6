"""The arguments of `regard examine`: those of its own module, which does not import PyTorch."""

from regard.cli.examine import __doc__, add_arguments

__all__ = ["__doc__", "add_arguments"]
