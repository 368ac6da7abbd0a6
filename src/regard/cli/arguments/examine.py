"""What may stand after `regard examine`: its own module, which needs no PyTorch."""

from regard.cli.examine import __doc__, add_arguments

__all__ = ["__doc__", "add_arguments"]
