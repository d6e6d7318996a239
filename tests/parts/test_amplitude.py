"""HarmoFL's amplitudes by hand, against a library's Fourier transform, and wherever a model is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from one_step import ONE, next_batch, plain_net
from torch import Tensor

from consilience.core.layout import Layout
from consilience.core.population import Population
from consilience.parts import parse_stack
from consilience.parts.affine import Affine
from consilience.parts.amplitude import Amplitude
from consilience.parts.debias import Debias
from consilience.parts.ditto import Ditto
from consilience.parts.local import Local
from consilience.parts.moon import Moon
from consilience.parts.mr import Mr
from consilience.parts.ntd import Ntd
from consilience.testing import run_tiny, state_of, tiny_federation, tiny_population


def normalised(x: Tensor, amplitude: Tensor, low: float = 0.0) -> Tensor:
    view: Any = SimpleNamespace(spec=SimpleNamespace(layout=Layout()), shared={"amplitude": amplitude})
    return Amplitude(low=low).tap(view, ":input", x)


def test_the_mean_brightness_by_hand() -> None:
    """b = 0: the coefficient is the mean m over the pixels, which becomes A·sign(m). 1 2 3 6 has the mean 3 and moves by 5 − 3;
    −1 −2 −3 −6 by −5 + 3; a picture whose mean is 0 has the phase 0 and moves by 5.
    """
    x = torch.tensor([[1.0, 2, 3, 6], [-1, -2, -3, -6], [1, -1, 2, -2]]).reshape(3, 1, 2, 2)
    got = normalised(x, torch.tensor([[[5.0]]]))
    torch.testing.assert_close(got, x + torch.tensor([2.0, -2, 5])[:, None, None, None])


def test_one_frequency_more_by_hand() -> None:
    """L = 1/4 of 4 is b = 1. Four rows of cos(2πj/4) = 1 0 −1 0 have the coefficient ½ at (0, ±1) and 0 elsewhere. Amplitudes of 2 there
    are four times as much; the mean, 3 with the phase 0, is added.
    """
    x = torch.tensor([1.0, 0, -1, 0]).expand(1, 1, 4, 4)
    wanted = torch.zeros(1, 3, 3)
    wanted[0, 1] = torch.tensor([2.0, 3, 2])              # the rest is unknown and stays
    torch.testing.assert_close(normalised(x, wanted, 0.25), 4 * x + 3, atol=1e-5, rtol=0)


def by_fft(x: Tensor, wanted: Tensor, most: int) -> Tensor:
    """The rule as it is written: amplitudes replaced in the centre of the shifted spectrum, phases kept."""
    f = torch.fft.fft2(x)
    size = torch.fft.fftshift(f.abs(), dim=(-2, -1))
    h, w = x.shape[-2] // 2, x.shape[-1] // 2
    size[..., max(h - most, 0): h + most + 1, max(w - most, 0): w + most + 1] = wanted * x.shape[-2] * x.shape[-1]
    return torch.fft.ifft2(torch.fft.ifftshift(size, dim=(-2, -1)) * torch.exp(1j * f.angle())).real


@given(st.integers(2, 9), st.integers(2, 9), st.sampled_from([0.0, 0.15, 0.3, 0.5, 1.0]), st.integers(0, 99))
def test_against_fft(height: int, width: int, low: float, seed: int) -> None:
    """Any size, odd and even, and blocks up to the whole spectrum; the amplitudes wanted are those of other pictures."""
    x, others = torch.randn(2, 3, 2, height, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    most = int(low * min(height, width))
    size = torch.fft.fftshift(torch.fft.fft2(others).abs(), dim=(-2, -1)).mean(0) / (height * width)
    h, w = height // 2, width // 2
    wanted = size[..., max(h - most, 0): h + most + 1, max(w - most, 0): w + most + 1]
    torch.testing.assert_close(normalised(x, wanted, low), by_fft(x, wanted, most))


def test_the_server_has_the_mean_over_clients_and_keeps_it() -> None:
    """Uniform over clients, whatever their sizes; each the mean over its samples. Later rounds do not touch it."""
    fed = tiny_federation([Amplitude(low=0.2)])
    assert not fed.shared["amplitude"]["amplitude"].any()
    fed.prepare()
    means = []
    for rows in fed.population.table:
        size = torch.fft.fftshift(torch.fft.fft2(fed.population.x[rows]).abs(), dim=(-2, -1)).mean(0) / 64
        means.append(size[:, 3:6, 3:6])
    torch.testing.assert_close(fed.shared["amplitude"]["amplitude"], torch.stack(means).mean(0))
    before = fed.shared["amplitude"]["amplitude"]
    fed.round([0, 3])
    assert fed.shared["amplitude"]["amplitude"] is before


def test_nothing_is_changed_before_anything_is_known() -> None:
    fed = tiny_federation([Amplitude()])
    x = fed.samples.x[:5]
    assert torch.equal(fed.look(0, fed.client(0), fed.model, x, False, False).logits, plain_net(fed.model, train=False)(x))


@pytest.mark.parametrize("number", [0, 1])
def test_a_step_with_perturbed_weights(number: int) -> None:
    """harmofl: w − η∇ℓ(w + α∇ℓ(w)/‖∇ℓ(w)‖) on normalised images."""
    fed = tiny_federation(parse_stack("harmofl(alpha=0.5, low=0.2)").parts, **ONE)
    fed.prepare()
    x, y = next_batch(fed, number)
    x = by_fft(x, fed.shared["amplitude"]["amplitude"], 1)
    net, there = plain_net(fed.model), plain_net(fed.model)
    grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    size = torch.sqrt(sum(g.square().sum() for g in grads))
    with torch.no_grad():
        for p, g in zip(there.parameters(), grads):
            p += 0.5 * g / size
    grads = torch.autograd.grad(F.cross_entropy(there(x), y), list(there.parameters()))
    fed.round([number])
    for (k, p), g in zip(net.named_parameters(), grads):
        torch.testing.assert_close(fed.model["params"][k], (p - 0.05 * g).detach(), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("more", [[], [Ditto()], [Local()]], ids=["alone", "ditto", "local"])
def test_every_model_sees_normalised_images(more: list[Any]) -> None:
    """The global model and a client's own, with and without taps."""
    fed = run_tiny([Amplitude(low=0.2), *more])
    x = fed.samples.x[:6]
    seen = by_fft(x, fed.shared["amplitude"]["amplitude"], 1)
    own, taps = fed.personal_model(3)
    for model, acting in ((fed.model, False), (own, taps)):
        got = fed.look(3, fed.client(3), model, x, False, acting).logits
        torch.testing.assert_close(got, plain_net(model, train=False)(seen), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("more", [[], [Ditto()], [Ntd()], [Moon()], [Debias(projection="released")]], ids=lambda m: m[0].name if m else "-")
def test_what_clients_brightness_is_cannot_be_learnt(more: list[Any]) -> None:
    """Images that are brighter by 3 are the same images once their mean is the one agreed on: in the main pass, in passes of received
    and previous models, over pseudo-data, and in the training of a second model.
    """
    people = tiny_population()
    ends = []
    for x in (people.x.abs() + 1, people.x.abs() + 4):
        fed = tiny_federation([Amplitude(), *more], population=Population(x, people.y, people.table, 3, people.transform))
        fed.prepare()
        fed.shared = {**fed.shared, "amplitude": {"amplitude": torch.tensor([[[2.0]]])}}
        fed.round()
        fed.round()
        ends.append(state_of(fed))
    for path in (p for p in ends[0] if p.startswith("model/params") or "/ditto/" in p):
        torch.testing.assert_close(ends[0][path], ends[1][path], atol=2e-4, rtol=1e-3, msg=path)


def test_others_prepare_with_normalised_images() -> None:
    """DBE's mean is that of features of normalised images: the amplitudes are agreed on first."""
    fed = tiny_federation([Amplitude(low=0.2), Mr(init_epochs=0)])
    fed.prepare()
    x = torch.cat([fed.population.x[rows] for rows in fed.population.table])
    net = plain_net(fed.model, train=False)
    want = net.header(net.neck(net.stage1(by_fft(x, fed.shared["amplitude"]["amplitude"], 1)))).mean(0)
    torch.testing.assert_close(fed.shared["mr"]["mean"], want.detach(), atol=1e-5, rtol=1e-4)


def test_an_affine_change_comes_first() -> None:
    """FedRobust changes samples, the amplitudes belong to the model, which gives a changed image its mean again: δ has no gradient."""
    people = tiny_population()
    fed = tiny_federation([Affine(), Amplitude()], population=Population(people.x.abs() + 1, people.y, people.table, 3, people.transform))
    fed.round()
    own = fed.client(0).tensors["personal"]["affine"]
    assert own["offset"].abs().item() < 1e-5 < (own["matrix"] - 1).abs().item()


def test_a_batch_of_one_and_a_picture_of_one_colour() -> None:
    """Every coefficient but the mean is 0, where a phase has no derivative: values and gradients stay finite."""
    x = torch.full((1, 2, 4, 4), 0.5, requires_grad=True)
    out = normalised(x, torch.rand(2, 3, 3) + 0.1, 0.25)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.isfinite(out).all()
    assert torch.isfinite(grad).all()


def test_only_images() -> None:
    vector: Any = SimpleNamespace(sample=(6,))
    assert "needs images" in (Amplitude().require(vector) or "")
    assert Amplitude().raw_averages
