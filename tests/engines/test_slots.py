"""The slots engine on a GPU gives what the sequential engine gives there."""

from __future__ import annotations

import pytest
import torch

from consilience.parts import PARTS
from consilience.testing import run_tiny, state_of, trial

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def _worst(a, b) -> float:
    one, other = state_of(a), state_of(b)
    assert one.keys() == other.keys()
    return max((float((one[k].double() - other[k].double()).abs().max()) for k in one if one[k].numel()), default=0.0)


@pytest.mark.parametrize("name", sorted(PARTS))
def test_slots_equal_sequential(name: str) -> None:
    """Same cohort, same batches, three rounds; equal to within float32 rounding, most parts bit for bit."""
    from consilience.engines.sequential import Sequential
    from consilience.engines.slots import Slots
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    part = trial(PARTS[name])
    one = run_tiny([part], rounds=3, device="cuda", engine=Sequential)
    many = run_tiny([part], rounds=3, device="cuda", engine=Slots)
    assert _worst(one, many) <= 1e-5
    assert many.engine.captured, many.engine.notes      # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["scaffold", "ffa", "mixup", "debias"])
def test_partial_batches(name: str) -> None:
    from consilience.engines.sequential import Sequential
    from consilience.engines.slots import Slots
    how = {"rounds": 2, "device": "cuda", "last_batch": "keep", "sizes": (24, 17, 3, 11)}
    assert _worst(run_tiny([trial(PARTS[name])], engine=Sequential, **how), run_tiny([trial(PARTS[name])], engine=Slots, **how)) <= 1e-5


def test_cpu_and_gpu_agree() -> None:
    from consilience.engines.slots import Slots
    assert _worst(run_tiny(rounds=2), run_tiny(rounds=2, device="cuda", engine=Slots)) <= 1e-3
