"""FedSAM on a parabola, where both passes can be done by hand."""

from __future__ import annotations

import pytest
import torch
from quadratic import W, vectors

from consilience.parts.prox import Prox
from consilience.parts.sam import Sam
from consilience.parts.scaffold import Scaffold
from consilience.testing import differences, run_tiny


def test_two_passes_by_hand():
    # w = (0, 0), a = (3, 4): g = (−3, −4), ‖g‖ = 5, the shift is ρ(−0.6, −0.8) with ρ = 0.5.
    # gradient there: (−0.3 − 3, −0.4 − 4) = (−3.3, −4.4); η = 0.1 → w = (0.33, 0.44).
    # second step: g = (−2.67, −3.56), norm 4.45, the same direction: gradient (−2.97, −3.96) → w = (0.627, 0.836)
    fed = vectors([Sam(rho=0.5)], [(3.0, 4.0)], [2], (0.0, 0.0))
    fed.round()
    assert fed.model["params"][W].flatten().tolist() == pytest.approx([0.627, 0.836], abs=1e-6)


def test_added_terms_are_wrapped_too():
    # With prox μ = 2 at w = 0.33: step 1 as above (no pull at the received model at first pass, but at the shifted point
    # w + ê = (−0.3, −0.4) the pull is 2·(−0.3, −0.4)): gradient (−3.3 − 0.6, −4.4 − 0.8) → w = (0.39, 0.52).
    fed = vectors([Sam(rho=0.5), Prox(mu=2.0)], [(3.0, 4.0)], [1], (0.0, 0.0))
    fed.round()
    assert fed.model["params"][W].flatten().tolist() == pytest.approx([0.39, 0.52], abs=1e-6)


def test_corrections_come_once_after_both_passes():
    # Round one of SCAFFOLD moves like SAM alone; c_i is what was walked per length: (w⁰ − w)/0.1 = (−3.3, −4.4), and c = c_i.
    # Round two, one client: −c_i + c = 0, so that the step is SAM's from (0.33, 0.44) to (0.627, 0.836).
    fed = vectors([Sam(rho=0.5), Scaffold()], [(3.0, 4.0)], [1], (0.0, 0.0))
    fed.round()
    assert fed.shared["scaffold"]["c"][W].flatten().tolist() == pytest.approx([-3.3, -4.4], abs=1e-5)
    fed.round()
    assert fed.model["params"][W].flatten().tolist() == pytest.approx([0.627, 0.836], abs=1e-6)
    # With two clients the correction is in the step but not in the shift: client 1 at a = (0, 5), client 0 at (3, 4).
    two = vectors([Sam(rho=0.5), Scaffold()], [(3.0, 4.0), (0.0, 5.0)], [1, 1], (0.0, 0.0))
    two.round()
    # shifts by ρ of unit gradients: gradients (−3.3, −4.4) and (0, −5.5); w = 0.1·mean = (0.165, 0.495); c = −(1.65, 4.95)
    w, c = torch.tensor([0.165, 0.495]), torch.tensor([-1.65, -4.95])
    ends = []
    for a, own in ((torch.tensor([3.0, 4.0]), torch.tensor([-3.3, -4.4])), (torch.tensor([0.0, 5.0]), torch.tensor([0.0, -5.5]))):
        g = w - a
        ends.append(w - 0.1 * (w + 0.5 * g / g.norm() - a - own + c))
    two.round()
    assert two.model["params"][W].flatten().tolist() == pytest.approx(((ends[0] + ends[1]) / 2).tolist(), abs=1e-5)


def test_statistics_come_from_the_first_pass_only():
    # After one step the running statistics are those of the unshifted model: bit for bit FedAvg's, and counted once.
    sam, plain = (run_tiny(p, rounds=1, steps=1) for p in ([Sam(rho=5.0)], []))
    assert not differences(sam, plain, only=lambda k: k.startswith("model/buffers"))
    assert differences(sam, plain, only=lambda k: k.startswith("model/params"))
    assert sam.model["buffers"]["stage1.1.num_batches_tracked"].item() == 1
