"""Compositions whose meaning had to be chosen (METHODS.md 10): each choice, seen in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from consilience import tree
from consilience.core.client import LocalWork
from consilience.core.part import Part
from consilience.engines.sequential import Sequential
from consilience.parts import PARTS
from consilience.testing import ReplayedSequential, check_trains, differences, in_model, run_tiny, tiny_federation, tiny_net, trial


def part(name: str, **settings: Any) -> Any:
    return PARTS[name](**({**PARTS[name].trial} | settings))


def test_statistics_come_from_the_first_of_sams_passes() -> None:
    """At a vanishing learning rate what is uploaded with SAM is what is uploaded without."""
    one = run_tiny([part("ffa")], lr=1e-30, momentum=0.0, weight_decay=0.0)
    other = run_tiny([part("ffa"), part("sam", rho=5.0)], lr=1e-30, momentum=0.0, weight_decay=0.0)
    assert not differences(one, other, only=lambda k: "ffa" in k)


def test_sam_wraps_the_objective_and_corrections_come_after(open_corrected: Any) -> None:
    """FedSAM + SCAFFOLD: the gradient at w + ρ g/‖g‖ of the objective alone, plus the correction once; it does not bend the shift."""
    mine, correction, before, batch = open_corrected
    net = tiny_net().train()
    own = dict(net.named_parameters())

    def gradient(at: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        net.load_state_dict({**at, **before["buffers"]})
        return dict(zip(own, torch.autograd.grad(F.cross_entropy(net(batch.x), batch.y), [*own.values()])))
    g = gradient(before["params"])
    length = torch.sqrt(sum(t.square().sum() for t in g.values()))
    shifted = gradient({k: w + 0.5 * g[k] / length for k, w in before["params"].items()})
    for k in own:
        torch.testing.assert_close(mine[k], shifted[k] + correction[k], rtol=1e-3, atol=1e-5)
    assert max(float(t.abs().max()) for t in correction.values()) > 1e-2


@pytest.fixture
def open_corrected(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The first step of round two of sam+scaffold: final gradient, correction, model before, batch."""
    from consilience.core import optimiser
    fed = tiny_federation([part("sam", rho=0.5), part("scaffold")])
    fed.round()
    fed.round_number += 1
    work = LocalWork(fed, 0, fed.client(0), [0, 1, 3], {})
    slot = fed.make_slot(work)
    work.load(slot)
    before, correction = tree.clone(slot.model), tree.clone(slot.scratch["scaffold"]["correction"])
    seen: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(optimiser, "update", lambda policy, params, grads, state, lr: seen.update(tree.clone(grads)))
    fed.program.begin(slot, fed.phases[0])
    step = fed.program.step(slot, fed.phases[0], 8)
    return seen, correction, before, step.batch


def test_fedrep_and_fedbr_step_their_adversary_in_the_base_phase_only() -> None:
    """The head's phase uploads nothing, so that the max step and statistics follow the base's phase only."""
    hooks = tiny_federation([part("rep"), part("debias"), part("ffa"), part("mr")]).program.hooks
    assert not hooks["head"]["adversary"]
    assert not hooks["head"]["track"]
    assert [p.name for p in hooks["base"]["adversary"]] == ["debias"]
    assert [p.name for p in hooks["base"]["track"]] == ["ffa", "mr"]


def test_fedbn_is_the_policy_local() -> None:
    assert not differences(run_tiny([part("bn")]), run_tiny(batchnorm="local"))


def test_fedrep_and_scaffold_correct_and_measure_the_base_alone() -> None:
    """The head stays local, so it has no variate; each key's path counts the steps of its own phases."""
    fed = run_tiny([part("rep", head_epochs=3), part("scaffold")])
    assert not any(k.startswith("head.") for k in fed.shared["scaffold"]["c"])
    work = LocalWork(fed, 0, fed.client(0), [0], {})
    path, policy = work.path(), fed.policy
    assert path["head.weight"] == pytest.approx(policy.path_length(9, policy.lr))          # 3 batches × 3 epochs
    assert path["header.weight"] == pytest.approx(policy.path_length(6, policy.lr))        # 3 batches × 2 epochs


def test_ditto_and_dbe_keep_to_their_own_models() -> None:
    """Shift and mean act on the uploaded model; Ditto's own model has neither, and is the one scored."""
    fed = run_tiny([part("ditto"), part("prbm"), part("mr")])
    assert fed.client(0).tensors["personal"]["prbm"]["shift"].abs().sum() > 0
    assert not differences(run_tiny([part("prbm"), part("mr")]), fed, only=in_model)
    model, taps = fed.personal_model(0)
    assert not taps
    assert torch.equal(model["params"]["head.weight"], fed.client(0).tensors["personal"]["ditto"]["model"]["params"]["head.weight"])
    assert [p.name for p in fed.program.hooks["ditto"]["terms"]] == ["ditto"]
    assert not fed.program.hooks["ditto"]["tap"]


def test_what_defines_the_task_acts_on_ditto_too() -> None:
    """Mixup changes the task: Ditto's own model trains on mixed batches. Prox is an added term, and stays with its model."""
    hooks = tiny_federation([part("ditto"), part("mixup"), part("drift"), part("prox")]).program.hooks["ditto"]
    assert [p.name for p in hooks["batch"]] == ["mixup"]
    assert [p.name for p in hooks["main_loss"]] == ["drift"]
    assert [p.name for p in hooks["terms"]] == ["ditto"]
    start = tiny_federation([part("ditto")], lr=0.05)
    plain, mixed = run_tiny([part("ditto")], rounds=1), run_tiny([part("ditto"), part("mixup", alpha=5.0)], rounds=1)
    own = [f.client(0).tensors["personal"]["ditto"]["model"]["params"]["head.weight"] for f in (start, plain, mixed)]
    assert not torch.equal(own[0], own[1])
    assert not torch.equal(own[1], own[2])


@pytest.mark.parametrize("name", ["manifold_mixup", "mixstyle", "moex"])
def test_fedfa_sees_features_that_were_mixed_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """METHODS.md 10.5: at one stage FedFA comes second, so its statistics (α = 0: of one batch) are of mixed maps; labels stay mixed."""
    settings = {"layers": (1,)} if name == "manifold_mixup" else {"p": 1.0}
    alone, both = (tiny_federation([part(name, **settings), *more], steps=1) for more in ([], [part("ffa", momentum=0.0)]))
    steps = []
    real = Sequential.steps

    def steps_seen(self: Sequential, slot: Any, phase: Any, sizes: list[int]) -> None:
        monkeypatch.setattr(self.program, "step", lambda *a, real=self.program.step: steps.append(real(*a)) or steps[-1])
        real(self, slot, phase, sizes)
    monkeypatch.setattr(Sequential, "steps", steps_seen)
    for fed in (alone, both):
        fed.round([0])
    one, other = (step.first for step in steps)
    before, mixed = one.trace.before["stage1"], one.trace.after["stage1"]
    assert float((mixed - before).detach().abs().max()) > 1e-2
    assert not torch.equal(other.trace.after["stage1"], mixed)
    std = lambda x: (x.detach().var((2, 3)) + 1e-6).sqrt().mean(0)
    seen = both.client(0).tensors["kept"]["ffa"]["stats"]["stage1"]
    torch.testing.assert_close(seen["std"], std(mixed))
    assert float((seen["std"] - std(before)).abs().max()) > 1e-4
    assert torch.equal(one.batch.target, other.batch.target)
    assert one.batch.target.is_floating_point() == (name != "mixstyle")


def test_lfd_and_fedfm_put_anchors_on_the_input_of_the_cosine_head() -> None:
    fed = run_tiny([part("cosine"), part("drift"), part("anchors")])
    assert fed.shared["anchors"]["anchor"].shape == (3, 12)
    assert fed.shared["anchors"]["seen"].all()
    assert fed.spec.shapes["head:input"] == (12,)


def test_fedfa_dbe_and_fedbn_leave_norm_layers_at_home() -> None:
    fed = run_tiny([part("ffa"), part("prbm"), part("mr"), part("bn")])
    assert torch.equal(fed.model["params"]["stage1.1.weight"], torch.ones(4))
    one, other = (fed.client(i).tensors["local"]["stage1.1.weight"] for i in (0, 1))
    assert not torch.equal(one, other)
    assert fed.shared["ffa"]["variance"]["stage1"]["mean"].std() > 0
    assert "stage1.1.weight" not in fed.spec.shared


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_frozen_means_frozen(momentum: float) -> None:
    """Neither weight decay nor SCAFFOLD's correction moves FedBABU's head: its keys are absent from the gradient, not zero in it."""
    fed = run_tiny([part("babu"), part("scaffold")], weight_decay=0.1, momentum=momentum)
    fresh = tiny_federation()
    for k in ("head.weight", "head.bias"):
        assert torch.equal(fed.model["params"][k], fresh.model["params"][k])
    assert not torch.equal(fed.model["params"]["header.weight"], fresh.model["params"]["header.weight"])


def test_fedavgm_never_pushes_running_statistics() -> None:
    """β = 0.9 on variances would overshoot; they are averaged, so they stay what FedAvg's rule makes of them."""
    fed = run_tiny([part("avgm")], rounds=4)
    assert set(fed.server["avgm"]["v"]) == set(fed.model["params"])
    assert (fed.model["buffers"]["stage1.1.running_var"] > 0).all()


def test_scaffold_is_fedavg_while_all_variates_are_zero() -> None:
    assert not differences(run_tiny(rounds=1), run_tiny([part("scaffold")], rounds=1), only=in_model)


@pytest.mark.parametrize("name", ["mixup", "ffa", "debias", "gen"])
def test_adding_a_part_changes_no_draw_of_another(name: str) -> None:
    """With a partner that adds nothing to the loss, what one part draws is unchanged; every idle partner changes no bit."""
    alone = run_tiny([trial(PARTS[name])], rounds=1)
    keys = set(tree_paths(alone))
    both = run_tiny([trial(PARTS[name]), part("dann", weight=0.0), part("prox", mu=0.0)], rounds=1)
    assert not differences(alone, both, only=lambda k: k in keys)


@dataclass(frozen=True)
class Calibrated(Part):
    """A loss that reads what init_scratch made of the client's labels, as FedLC's does."""

    name, not_neutral, helps = "calibrated", "always acts", ("label skew",)

    def init_scratch(self, c: Any) -> Any:
        return {"margin": torch.bincount(c.labels(), minlength=c.spec.classes).clamp(min=1).pow(-0.25)}

    def main_loss(self, v: Any) -> Any:
        return v.task_loss(v.trace.logits - v.scratch["margin"], v.batch.target)


def test_plain_training_finds_what_the_loss_is_made_of() -> None:
    """DBE's first epoch is trained by the stack's own loss, which may read what the round begins with."""
    both, alone = tiny_federation([Calibrated(), part("mr")]), tiny_federation([part("mr")])
    both.prepare(), alone.prepare()
    assert differences(both, alone, only=lambda path: path == "shared/mr/mean")
    assert not differences(run_tiny([Calibrated(), part("mr")]), run_tiny([Calibrated(), part("mr")], engine=ReplayedSequential))


@dataclass(frozen=True)
class Forgetful(Part):
    """Its loss needs what only a round's main pass leaves."""

    name, not_neutral, helps = "forgetful", "always acts", ("label skew",)

    def points(self, layout: Any) -> Any:
        return ("head",)

    def tap(self, v: Any, point: str, x: Any) -> Any:
        return x, x.square().mean()

    def main_loss(self, v: Any) -> Any:
        return v.task_loss(v.trace.logits, v.batch.target) + v.notes["head"]


def test_the_contract_finds_a_loss_that_plain_training_cannot_use() -> None:
    with pytest.raises(AssertionError, match="forgetful: plain training"):
        check_trains(Forgetful())


def tree_paths(fed: Any) -> list[str]:
    from consilience.testing import state_of
    return list(state_of(fed))
