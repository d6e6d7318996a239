"""The fused cross-entropy gives what PyTorch's gives, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from consilience import rng
from consilience.core import task
from consilience.kernels import loss
from kernel_device import DEVICE, ON_HOST, needs_cuda, needs_kernels

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _kernels() -> None:
    needs_kernels()


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The task's; in the interpreter the kernel itself, since the task looks at the device."""
    if ON_HOST:
        return loss.CrossEntropy.apply(logits, target)
    assert loss.usable(logits, target)
    return task.cross_entropy(logits, target)


def drawn(rows: int, classes: int, soft: bool) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (rng.normal(rng.key(0, "logits"), (rows, classes)) * 5).to(DEVICE).requires_grad_()
    if soft:
        return logits, rng.normal(rng.key(0, "t"), (rows, classes)).softmax(1).to(DEVICE)
    return logits, rng.integers(rng.key(0, "y"), classes, (rows,)).to(DEVICE)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (10, 10), (7, 10), (64, 100), (300, 10), (3, 1000), (32, 1024)])
def test_equals_pytorch(rows: int, classes: int, soft: bool) -> None:
    logits, target = drawn(rows, classes, soft)
    seen = []
    for value in (F.cross_entropy(logits, target), cross_entropy(logits, target)):
        seen.append((value.detach(), torch.autograd.grad(3 * value, logits)[0]))
    for theirs, ours in zip(*seen):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_same_numbers_give_the_same_loss() -> None:
    logits, target = drawn(300, 10, False)
    losses = {cross_entropy(logits, target).item() for _ in range(20)}
    assert len(losses) == 1


@pytest.mark.parametrize("soft", [False, True])
def test_gradients_of_gradients(soft: bool) -> None:
    logits, target = drawn(9, 5, soft)
    seen = []
    for value in (F.cross_entropy(logits, target), cross_entropy(logits, target)):
        (g,) = torch.autograd.grad(value, logits, create_graph=True)
        seen.append(torch.autograd.grad(g.square().sum(), logits)[0])
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-6)


def test_a_label_that_is_no_class_shows_in_the_loss() -> None:
    logits, _ = drawn(4, 3, False)
    assert not cross_entropy(logits, torch.tensor([0, 1, 2, 3], device=DEVICE)).isfinite()


def test_what_the_kernel_does_not_know_goes_to_pytorch() -> None:
    needs_cuda()
    logits, target = drawn(4, 3, False)
    assert not loss.usable(logits.double(), target)
    assert not loss.usable(logits.cpu(), target.cpu())
    assert not loss.usable(torch.zeros(4, 1025, device=DEVICE), target)
    assert not loss.usable(torch.zeros(4, 3, 2, 2, device=DEVICE), torch.zeros(4, 2, 2, dtype=torch.int64, device=DEVICE))
