"""Secret noise: normal, repeatable for its owner alone, and never the same over two different uploads."""

from __future__ import annotations

import torch

from consilience.privacy.noise import add_noise, secret_normal

SECRET = bytes(range(32))


def test_it_is_standard_normal() -> None:
    """200,000 numbers: the mean's standard error is 0.0022, the variance's 0.0032, the kurtosis' 0.011."""
    x = secret_normal(SECRET, "round 1", [torch.zeros(3)], 200_001).double()
    assert len(x) == 200_001
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.var()) - 1) < 0.015
    assert abs(float((x**4).mean()) - 3) < 0.06
    assert abs(float((x[:100_000] * x[100_001:]).mean())) < 0.015           # the two halves come from the same pairs
    assert float(x.abs().max()) > 4


def test_the_same_upload_carries_the_same_noise_and_another_upload_other_noise() -> None:
    hidden = [torch.tensor([1.0, 2.0])]
    draw = lambda secret=SECRET, label="round 1", what=hidden: secret_normal(secret, label, what, 8)
    assert torch.equal(draw(), draw())
    for other in (draw(secret=bytes(32)), draw(label="round 2"), draw(what=[torch.tensor([1.0, 2.0000002])]),
                  draw(what=[torch.tensor([1.0]), torch.tensor([2.0])]), draw(what=[torch.tensor([[1.0, 2.0]])])):
        assert not (draw() == other).any()


def test_the_same_upload_under_another_deviation_carries_other_noise() -> None:
    """x + n and x + 2n would give x = 2(x + n) − (x + 2n)."""
    x, key = torch.tensor([0.5, -3.0, 7.0, 0.25]), torch.tensor(5)
    once, again, twice = (add_noise([x], deviation, key, SECRET, "client")[0] for deviation in (1.0, 1.0, 2.0))
    assert torch.equal(once, again)
    assert ((2 * once - twice - x).abs() > 1e-3).all()
