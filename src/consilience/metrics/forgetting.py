"""What local training keeps of the global model, class by class (LfD, eq. 11)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def local_preservation(before: Sequence[float | None], after: Sequence[float | None], present: Collection[int]) -> dict[str, Any]:
    """LP = mean over classes of accuracy after local training / accuracy of the global model before it.

    `before` and `after` hold one accuracy per class, None for a class without test samples. LP is given over the classes present
    in the client's training samples and over those absent. A class that the global model never gets right has no ratio:
    it is skipped and counted.
    """
    out: dict[str, Any] = {}
    for label, mine in (("present", True), ("absent", False)):
        ratios, zero, untested = [], 0, 0
        for c, (b, a) in enumerate(zip(before, after)):
            if (c in present) is not mine:
                continue
            if b is None or a is None:
                untested += 1
            elif b == 0:
                zero += 1
            else:
                ratios.append(a / b)
        out[label] = {"lp": sum(ratios) / len(ratios) if ratios else None, "classes": len(ratios), "skipped_zero": zero,
                      "untested": untested}
    return out
