"""The parts' fused kernels give what their tensor operations give: loss, gradients and state, term by term and over whole rounds.

On a GPU by tests marked so; elsewhere through Triton's interpreter, where Triton is installed and TRITON_INTERPRET=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from consilience import rng
from consilience.core.slot import Slot, known_one
from consilience.parts.anchors import Anchors
from consilience.parts.cosine import Cosine, CosineHead
from consilience.parts.debias import Debias
from consilience.parts.drift import Drift
from consilience.parts.kernels import anchors, cosine, debias, drift, fused, moon, mr
from consilience.parts.moon import Moon
from consilience.parts.mr import Mr
from consilience.parts.prbm import Prbm
from consilience.testing import largest_difference, run_tiny
from kernel_device import ON_HOST

Make = Callable[..., Tensor]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where kernels run: on a GPU, or interpreted on the CPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "cpu" and (fused.triton is None or not ON_HOST):
        pytest.skip("needs Triton and TRITON_INTERPRET=1")
    monkeypatch.setattr(fused, "DEVICE", request.param)
    if request.param == "cpu":
        monkeypatch.setattr(Slot, "one_for", lambda _, loss: known_one(loss.device))         # ways back begin as on a GPU here too
    return str(request.param)


@pytest.fixture
def make(device: str) -> Make:
    """make(name, shape…): normal numbers that depend on the name alone, and ask for gradients."""
    return lambda name, *shape: rng.normal(rng.key(11, name), shape).to(device).requires_grad_()


def agree(theirs: Any, ours: Any, inputs: list[Tensor]) -> None:
    """The same value and the same gradients, under a factor that is not 1. A GPU's exponentials are less exact than the CPU's."""
    close: Any = {"rtol": 1e-5, "atol": 1e-5} if ours.is_cuda else {"rtol": 2e-6, "atol": 1e-6}
    torch.testing.assert_close(ours, theirs, **close)
    want, got = (torch.autograd.grad(loss * 0.7, inputs, materialize_grads=True, retain_graph=True) for loss in (theirs, ours))
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-4 if ours.is_cuda else 2e-5, atol=close["atol"])


def labels(device: str, rows: int, classes: int, soft: bool) -> Tensor:
    if soft:
        return rng.normal(rng.key(3, "soft"), (rows, classes)).softmax(1).to(device)
    return rng.integers(rng.key(3, "hard"), classes, (rows,)).to(device)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(("rows", "classes", "width"), [(10, 10, 512), (40, 7, 24), (5, 100, 130)])
def test_guiding(device: str, make: Make, rows: int, classes: int, width: int, soft: bool) -> None:
    """A third of the classes has no anchor, among them some that rows are labelled with."""
    h, y = make("h", rows, width), labels(device, rows, classes, soft)
    seen = torch.arange(classes, device=device) % 3 != 0
    anchor, weight, absent = F.normalize(make("a", classes, width).detach()) / 0.1, 5.0 * seen, torch.where(seen, 0.0, -1e4)
    assert anchors.usable(h, anchor)
    near = torch.addmm(absent, F.normalize(h), anchor.T)
    agree(F.cross_entropy(near, y, weight=weight, reduction="sum") / rows, anchors.guide(h, anchor, absent, weight, y), [h])


@pytest.mark.parametrize(("rows", "width", "pseudo", "classes"), [(10, 128, 10, 10), (33, 24, 40, 7), (7, 500, 7, 100)])
@pytest.mark.parametrize("temperature", [(2.0, 2.0), (0.5, 0.0), (40.0, 30.0)])
@pytest.mark.parametrize("which", ["both", "contrast", "pseudo", "pseudo with labels"])
def test_terms_of_fedbr(monkeypatch: pytest.MonkeyPatch, device: str, make: Make, rows: int, width: int, pseudo: int, classes: int,
                        temperature: tuple[float, float], which: str) -> None:
    """Large τ reach both ends of the softplus."""
    projected, logits = make("t", 3 * rows, width), make("l", pseudo, classes)
    given = (projected if which in ("both", "contrast") else None, 0.5, None if which == "contrast" else logits,
             labels(device, pseudo, classes, True) if which.endswith("labels") else None)
    part = Debias(tau1=temperature[0], tau2=temperature[1], lam=0.3)
    assert debias.usable(given[0], given[2])
    ours = part._terms(*given)
    monkeypatch.setattr(debias, "usable", lambda *_: False)
    agree(part._terms(*given), ours, [projected, logits])


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(10, 512), (40, 24), (5, 130)])
def test_contrast_of_moon(device: str, make: Make, rows: int, width: int, first: bool) -> None:
    z, received, previous = make("z", rows, width), make("g", rows, width).detach(), make("p", rows, width).detach()
    never = torch.tensor(first, device=device)
    near, far = F.cosine_similarity(z, received), F.cosine_similarity(z, previous)
    for tau in (0.5, 0.01):
        theirs = 5.0 * torch.where(never, 0.0, F.softplus((far - near) / tau).mean())
        agree(theirs, moon.contrast(z, received, previous, never, 5.0, tau), [z])


@pytest.mark.parametrize("momentum", [1.0, 0.1])
@pytest.mark.parametrize(("rows", "shape"), [(10, (512,)), (40, (3, 5, 7)), (1, (24,))])
def test_mean_regularisation(device: str, make: Make, rows: int, shape: tuple[int, ...], momentum: float) -> None:
    z, old, goal = make("z", rows, *shape), make("o", *shape).detach(), make("g", *shape).detach()
    steps = torch.tensor(3.0, device=device)
    assert mr.usable(z, old)
    mean = (1 - momentum) * old + momentum * z.mean(0)
    new, after, ours = mr.regularise(z, old, goal, steps, momentum, 2.5)
    torch.testing.assert_close(new, mean.detach(), rtol=1e-6, atol=1e-6)
    assert float(after) == 4.0
    agree(2.5 * F.mse_loss(mean, goal), ours, [z])


@pytest.mark.parametrize(("rows", "classes", "width"), [(10, 10, 512), (20, 20, 24), (5, 3, 130)])
def test_cosines(monkeypatch: pytest.MonkeyPatch, device: str, make: Make, rows: int, classes: int, width: int) -> None:
    """Also where only features, or only weights, ask for a gradient."""
    head = CosineHead(width, classes, 0.1).to(device)
    u, shape = make("u", rows, width), make("s", rows, classes).detach()
    head.weight.data.copy_(make("w", classes, width).detach())
    asked = [(u, head.weight), (u.detach(), head.weight), (u, head.weight.detach())]
    seen: list[Any] = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(cosine, "usable", lambda *_: False)
        for x, w in asked:
            out = cosine.cosines(x, w, 10.0) if kernels else F.linear(F.normalize(x), F.normalize(w)) / 0.1
            seen.append([head(u), out, *torch.autograd.grad((out * shape).sum(), [t for t in (x, w) if t.requires_grad])])
    for ours, theirs in zip(seen[:3], seen[3:]):
        for one, other in zip(ours, theirs):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("settings", [{}, {"first": "uniform", "drift_tau": 0.5}, {"margin_in_reg": False, "weight": 0.3, "margin": 0.3}],
                         ids=str)
def test_terms_of_lfd(monkeypatch: pytest.MonkeyPatch, device: str, make: Make, settings: dict[str, Any], first: bool, soft: bool) -> None:
    for rows, classes in ((10, 10), (40, 7)):
        f, received, previous = (make(name, rows, classes) for name in "frp")
        view = _View(f, received.detach(), previous.detach(), labels(device, rows, classes, soft), torch.tensor(first, device=device))
        part, asked = Drift(**settings), []
        for kernels in (False, True):
            with monkeypatch.context() as patch:
                if not kernels:
                    patch.setattr(drift, "usable", lambda *_: False)
                view.memo = {}
                asked.append([part.main_loss(view), part.loss(view)])         # type: ignore[arg-type]
        for theirs, ours in zip(*asked):
            agree(theirs, ours, [f])
        agree(asked[0][0] + asked[0][1], asked[1][0] + asked[1][1], [f])


class _View:
    """What `Drift` reads of a step."""

    def __init__(self, f: Tensor, received: Tensor, previous: Tensor, target: Tensor, first: Tensor) -> None:
        Shown = type("Shown", (), {})
        self.trace, self.batch, self.spec = Shown(), Shown(), Shown()
        self.trace.logits, self.batch.target, self.batch.x, self.spec.classes = f, target, None, f.shape[1]
        self.received, self.previous, self.first = received, previous, first
        self.memo: dict[str, Any] = {}

    def forward(self, model: Tensor, x: Any) -> Any:
        return type("Shown", (), {"logits": model})

    def once(self, label: str, compute: Callable[[], Any]) -> Any:
        if label not in self.memo:
            self.memo[label] = compute()
        return self.memo[label]


ROUNDS: dict[str, list[Any]] = {
    "fedfm": [Anchors(start=0, weight=2.0)], "fedbr": [Debias(projection="released")], "fedbr mixture": [Debias(pseudo="mixture")],
    "moon": [Moon()], "dbe": [Mr(kappa=5.0, momentum=0.5), Prbm()], "lfd": [Drift(), Cosine()]}


@pytest.mark.parametrize("name", ROUNDS)
def test_whole_rounds(monkeypatch: pytest.MonkeyPatch, device: str, name: str) -> None:
    """Two rounds leave the same behind with and without kernels, and the kernels did run. (Convolutions on a GPU round to TF32.)"""
    launched: list[int] = []
    real = fused.launch

    def launch(*args: Any, **more: Any) -> None:
        launched.append(1)
        real(*args, **more)
    how = {"sizes": (16, 9), "epochs": 1, "device": device}
    monkeypatch.setattr(fused, "launch", launch)
    ours = run_tiny(ROUNDS[name], **how)
    assert launched
    count = len(launched)
    monkeypatch.setattr(fused, "DEVICE", "none")
    plain = run_tiny(ROUNDS[name], **how)
    assert len(launched) == count
    assert largest_difference(ours, plain) < (2e-3 if device == "cuda" else 2e-5)


def test_wide_rows_and_other_types_take_the_tensor_operations(device: str) -> None:
    narrow, wide = torch.zeros(4, 512, device=device), torch.zeros(4, 513, device=device)
    assert fused.ready(narrow, width=512)
    assert not fused.ready(wide, width=513)
    assert not fused.ready(narrow.double(), width=512)
    assert not fused.ready(narrow.T, width=4)
    assert not fused.ready(narrow, width=512, classes=129)
