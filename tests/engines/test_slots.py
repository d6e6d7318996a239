"""The slots engine on a GPU gives what the sequential engine gives there."""

from __future__ import annotations

import gc

import pytest
import torch

from consilience import rng
from consilience.core.federation import Federation
from consilience.core.method import Method
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.data import as_float
from consilience.engines.sequential import Sequential
from consilience.engines.slots import Slots
from consilience.metrics.accuracy import score_global, score_personal
from consilience.models import make
from consilience.parts import PARTS
from consilience.testing import largest_difference, run_tiny, state_of, trial

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("name", sorted(PARTS))
def test_slots_equal_sequential(name: str) -> None:
    """Same cohort, same batches, three rounds; equal to within float32 rounding, most parts bit for bit."""
    if name == "dp":
        pytest.importorskip("dp_accounting")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    part = trial(PARTS[name])
    one = run_tiny([part], rounds=3, device="cuda", engine=Sequential)
    many = run_tiny([part], rounds=3, device="cuda", engine=Slots)
    assert largest_difference(one, many) <= 1e-5
    assert many.engine.captured, many.engine.notes      # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["scaffold", "ffa", "mixup", "debias"])
def test_partial_batches(name: str) -> None:
    how = {"rounds": 2, "device": "cuda", "last_batch": "keep", "sizes": (24, 17, 3, 11)}
    one, many = (run_tiny([trial(PARTS[name])], engine=engine, **how) for engine in (Sequential, Slots))
    assert largest_difference(one, many) <= 1e-5


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_slopes_through_group_norm(precision: str, layout: str) -> None:
    """FedMix on FedBR's CNN, whose gradients of gradients are kernels. Of 20 samples the last batch has four."""
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    data = Population((rng.uniform(rng.key(0, "x"), (80, 1, 28, 28)) * 255).to(torch.uint8), rng.integers(rng.key(0, "y"), 10, (80,)),
                      tuple(torch.arange(80).split(20)), 10, as_float)
    policy = Policy(lr=0.05, momentum=0.9, weight_decay=1e-3, batch=8, epochs=2, last_batch="keep", precision=precision, layout=layout)
    runs = []
    for engine in (Sequential, Slots):
        built = make("mnist_cnn", sample=(1, 28, 28), classes=10, key=rng.key(0, "model"))
        fed = Federation(built.module, built.layout, Method([trial(PARTS["mix"])]), data, policy, engine, "cuda")
        for _ in range(2):
            fed.round()
        runs.append(fed)
    assert largest_difference(*runs) <= 1e-5
    assert runs[1].engine.captured, runs[1].engine.notes      # type: ignore[attr-defined]


@pytest.mark.parametrize("names", [[], ["prbm"], ["babu"], ["ditto"], ["fomo"], ["proto"], ["moreau"], ["apple"]])
def test_scores_on_several_streams(names: list[str]) -> None:
    """Clients that are scored on streams of their own score what they score one after another, however often they are asked."""
    how = {"rounds": 2, "device": "cuda", "sizes": (24, 17, 30, 40, 26, 33)}
    one, many = (run_tiny([trial(PARTS[n]) for n in names], engine=engine, **how) for engine in (Sequential, Slots))
    rows, labels = [one.samples.rows[i].train for i in range(6)], [str(i) for i in range(6)]
    for score in (score_global, score_personal):
        wanted = score(one, rows, labels)
        for _ in range(3):
            got = score(many, rows, labels)
            assert got.counts == wanted.counts
            for measure, values in wanted.values.items():
                assert got.values[measure] == pytest.approx(values, abs=1e-4)


def test_cpu_and_gpu_agree() -> None:
    assert largest_difference(run_tiny(rounds=2), run_tiny(rounds=2, device="cuda", engine=Slots)) <= 1e-3


def _heavy(most: int) -> Federation:
    """Two rounds of a model whose slots take more than 100 MB each."""
    data = Population((rng.uniform(rng.key(0, "x"), (512, 3, 32, 32)) * 255).to(torch.uint8), rng.integers(rng.key(0, "y"), 10, (512,)),
                      tuple(torch.arange(512).split(64)), 10, as_float)
    built = make("vgg11", sample=(3, 32, 32), classes=10, key=rng.key(0, "model"))
    fed = Federation(built.module, built.layout, Method([]), data, Policy(lr=0.01, batch=32), Slots.of(most), "cuda")
    for _ in range(2):
        fed.round()
    return fed


def test_slots_halve_when_memory_runs_out() -> None:
    """With memory for some of the slots only, the run goes on with fewer, says so, and gives the same numbers."""
    def empty() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_reserved()

    taken = {}
    for most in (1, 8):
        before = empty()
        wanted = {k: t.cpu() for k, t in state_of(_heavy(most)).items()}
        taken[most] = torch.cuda.max_memory_reserved() - before
    assert taken[8] > taken[1] + (200 << 20), "the work is too small to run out of memory"
    bound = empty() + (taken[1] + taken[8]) / 2
    try:
        torch.cuda.set_per_process_memory_fraction(bound / torch.cuda.get_device_properties(0).total_memory)
        tight = _heavy(8)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("memory sufficed for" in note for note in tight.engine.notes)      # type: ignore[attr-defined]
    assert tight.engine.most < 8                                                   # type: ignore[attr-defined]
    got = state_of(tight)
    assert max(float((got[k].cpu().double() - wanted[k].double()).abs().max()) for k in got if got[k].numel()) <= 1e-5
