"""What a score over rounds says: when it was reached, how much sooner than elsewhere, how good at its best."""

from __future__ import annotations

from collections.abc import Sequence

Curve = Sequence[tuple[int, float]]        # (round, score) of every scored round, in order
ROUNDING = 1e-9                            # of a mean over clients, or of a difference, in binary fractions; one sample is more


def rounds_to(curve: Curve, threshold: float) -> int | None:
    """The first scored round at or above the threshold; None (printed as '-') if there is none."""
    return next((number for number, score in curve if score >= threshold - ROUNDING), None)


def speed_up(reference: int | None, own: int | None) -> float | None:
    """How many times fewer rounds than the reference needed."""
    return reference / own if reference is not None and own else None


def mean_of_best(curve: Curve, count: int = 5) -> float | None:
    """Mean of the highest scores, wherever they stand; of all of them where there are fewer."""
    best = sorted((score for _, score in curve), reverse=True)[:count]
    return sum(best) / len(best) if best else None
