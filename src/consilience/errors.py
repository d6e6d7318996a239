"""Errors a user can act on. The command line prints them without a traceback and exits with `exit_code`."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence


class ConsilienceError(Exception):
    """Something a user can mend; the message says what, where and how."""

    exit_code = 2


class ConfigError(ConsilienceError):
    """A setting that is unknown, out of range, or contradicts another."""


class RefusedCombination(ConfigError):
    """Two parts that cannot stand in one stack."""


class DataError(ConsilienceError):
    """Files or samples that are missing, damaged, or too few for what was asked."""


class DeviceError(ConsilienceError):
    """A GPU that is there and cannot be used now."""


class NonFiniteError(ConsilienceError):
    """Training produced infinity or NaN; nothing was aggregated from it."""

    exit_code = 3


class ConsilienceWarning(UserWarning):
    """What a user should know of a run that goes on all the same."""


def warn_caller(message: str) -> None:
    """Python's own warning, at the line outside of this package that asked for the work."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, ConsilienceWarning, stacklevel=level)


def did_you_mean(wrong: str, known: Iterable[str], most: int = 3) -> str:
    """' Did you mean …?' with the nearest names, or the list of what there is when nothing is near."""
    names = sorted({str(k) for k in known})
    lowered = {n.lower(): n for n in names}
    near = difflib.get_close_matches(wrong.lower(), lowered, n=most, cutoff=0.5)
    if near:
        return f" Did you mean {' or '.join(repr(lowered[n]) for n in near)}?"
    return f" Known: {', '.join(names)}." if names else ""


def unknown(kind: str, wrong: str, known: Iterable[str], error: type[ConsilienceError] = ConfigError) -> ConsilienceError:
    """The error for a name that nothing answers to."""
    return error(f"Unknown {kind} {wrong!r}.{did_you_mean(wrong, known)}")


def some(names: Sequence[str], most: int = 8) -> str:
    """Names in a message, however many there are."""
    return ", ".join(names[:most]) + (f" … ({len(names)} in all)" if len(names) > most else "")
