"""A run: its configuration, its loop, what it records and how it goes on after a stop."""

from .config import RunConfig
from .result import Result
from .run import build_federation, run

__all__ = ["Result", "RunConfig", "build_federation", "run"]
