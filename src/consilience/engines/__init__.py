"""Where local steps run. Same method code, same numbers, other place of execution."""

from .sequential import Sequential

__all__ = ["Sequential"]
