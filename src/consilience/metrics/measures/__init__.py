"""The measures that come with the package. Importing a file of this package registers what it holds."""

from . import costs, local, representations, rounds, scores

__all__ = ["costs", "local", "representations", "rounds", "scores"]
