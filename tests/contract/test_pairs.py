"""Every pair of parts: refused for a printed reason, or it trains, in one order of folding whichever was typed first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch

from consilience.core.method import Method
from consilience.core.part import Part
from consilience.errors import RefusedCombination
from consilience.parts import PARTS
from consilience.testing import SIZES, check_pair, differences, run_tiny, state_of, trial

NAMES = sorted(PARTS)

# METHODS.md 10.6, and what follows from the parts' own nature. A pair that joins or leaves this list is a decision.
_NEEDS_AN_AVERAGE = ("avgm", "cm", "dro", "dyn", "moreau", "nova", "scaffold")
_COMPARE_CLIENTS = ("apple", "dann", "dro", "fomo", "nova", "scaffold")
_PERSONAL = ("apfl", "babu", "bn", "ditto", "maml", "moreau", "per", "prbm", "rep", "rod")
REFUSED: dict[str, str] = {          # where there are several reasons, the one that is said stands last
    **{"+".join(pair): "both define `personalise`" for pair in combinations(("apfl", "apple", "babu", "ditto", "maml", "moreau"), 2)},
    **{"+".join(pair): "both define `gradient`" for pair in combinations(("apple", "maml", "moreau", "sam"), 2)},
    **{"+".join(pair): "both claim the question of what travels" for pair in combinations(("apple", "fomo", "local"), 2)},
    **{f"{name}+fomo": "fomo has no global model" for name in _NEEDS_AN_AVERAGE},
    **{f"{name}+local": "local has no global model" for name in _NEEDS_AN_AVERAGE},
    **{f"{name}+apple": "apple has no global model" for name in _NEEDS_AN_AVERAGE},
    **{f"{name}+union": f"{name} has personal models" for name in _PERSONAL},
    "local+union": "local has no global model",
    **{f"{name}+union": f"{name} has a comparison of clients" for name in _COMPARE_CLIENTS},
    **{f"{name}+{alone}": f"{alone} has no global model" for name in ("bn", "per", "prox") for alone in ("apple", "fomo", "local")},
    **{f"moon+{alone}": f"{alone} has clients that receive the model they trained" for alone in ("apple", "local", "union")},
    **{f"{name}+rep": f"{name} has whole models that go to other clients" for name in ("apple", "fomo")},
    "per+rep": "both claim the head's place",
    **{f"babu+{name}": "babu has a frozen random head" for name in ("gen", "per")},
    **{f"{other}+{name}": f"{name} has local head"
       for other in ("apfl", "gen", "rod") for name in ("apple", "fomo", "local", "per", "rep")},
    **{f"maml+{name}": f"{name} has no global model" for name in ("apple", "fomo", "local")},
    **{f"maml+{name}": f"{name} has partners within a batch" for name in ("manifold_mixup", "mixstyle", "moex")},
    "manifold_mixup+moex": "both define `relabel`",
    **{f"affine+{name}": f"affine ascends the loss before {name} mixes the labels" for name in ("manifold_mixup", "moex")},
    **{f"apfl+{name}": f"apfl passes batches through its own model as they are, and {name}" for name in ("manifold_mixup", "moex")},
    "apfl+mix": "apfl steps its own model by the task's loss, and mix has inputs",
    **{f"{name}+rod": f"{name} has a separate personal model" for name in ("apfl", "ditto")},
    "babu+rod": "babu has a frozen random head",
    "cosine+rod": "rod has a second head",
    "drift+rod": "both define `main_loss`",
    "babu+cosine": "babu has a frozen random head",
    "cosine+vhl": "vhl has extra outputs",
    **{f"{name}+vhl": f"vhl adds outputs to the task's own loss, and {name} has another" for name in ("drift", "mix", "rod")},
    "babu+rep": "both claim the phases of the model",
    **{f"{name}+{hard}": f"{name} has soft labels" for name in ("manifold_mixup", "mix", "mixup", "moex") for hard in ("ntd", "rod")},
    "drift+mix": "both define `main_loss`",
    **{f"mix+{name}": f"mix takes the gradient of a gradient, and {name} has a gradient of its own"
       for name in ("apple", "maml", "moreau", "sam")},
    **{f"dp+{name}": "only place=local protects those" for name in ("debias", "dro", "ffa", "gen", "mix", "nova")},
    **{f"{name}+dp": f"{name} uploads whole models, and dp bounds uploads as if they were changes" for name in ("apple", "fomo")},
    "dp+union": "union pools them into one",
}
EXPECTED = {frozenset(pair.split("+")): reason for pair, reason in REFUSED.items()}


THIRDS = 3          # with forty-odd parts there are a thousand pairs: one in three is trained here, all of them in the slow suite


SMALL = (16, 9, 5, 8)        # three clients that train; their eight steps in each of two rounds call every hook


def _train_pairs(first: str, seconds: list[str], sizes: tuple[int, ...]) -> None:
    a = trial(PARTS[first])
    for second in seconds:
        ran = check_pair(a, trial(PARTS[second]), sizes)
        assert ran == (frozenset((first, second)) not in EXPECTED), f"{first}+{second} is {'accepted' if ran else 'refused'}"


@pytest.mark.parametrize("first", NAMES[:-1])
def test_pairs_with(first: str) -> None:
    """One test for a part and every third of the parts after it in the alphabet, beginning at another place for each."""
    place = NAMES.index(first)
    _train_pairs(first, NAMES[place + 1 + place % THIRDS::THIRDS], SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("first", NAMES[:-1])
def test_all_pairs_with(first: str) -> None:
    """One test for a part and all parts after it in the alphabet."""
    _train_pairs(first, NAMES[NAMES.index(first) + 1:], SIZES)


_NOTHING_TO_PROTECT = frozenset(("dp", "local"))         # accepted, for beside proto something is sent; explain says that here nothing is


def _acts(second: Part, first: Part, alone: dict[str, torch.Tensor]) -> bool:
    """Whether a second part leaves more than rounding in the first one's training, or serves clients by a model of its own."""
    if Method([second]).using("personalise") or type(second).init_personal is not Part.init_personal:
        return True
    both = state_of(run_tiny([first, second], rounds=3))
    return any(not torch.allclose(t.double(), both[path].double(), rtol=1e-4, atol=1e-6) for path, t in alone.items()
               if path.startswith(("model/", "clients/")) and path in both)


@pytest.mark.slow
@pytest.mark.parametrize("first", NAMES)
def test_nobody_is_idle_beside(first: str) -> None:
    """A part that changes nothing beside another would pass the other's numbers for the stack's: it is refused."""
    part = trial(PARTS[first])
    alone = state_of(run_tiny([part], rounds=3))
    idle = [name for name in NAMES if name != first and frozenset((first, name)) not in EXPECTED and {first, name} != _NOTHING_TO_PROTECT
            and not _acts(trial(PARTS[name]), part, alone)]
    assert not idle


def test_refusals_are_the_known_ones_and_say_why() -> None:
    seen = {}
    for i, a in enumerate(NAMES):
        for b in NAMES[i + 1:]:
            try:
                Method([trial(PARTS[b]), trial(PARTS[a])])
            except RefusedCombination as error:
                seen[frozenset((a, b))] = str(error)
    assert set(seen) == set(EXPECTED)
    for pair, reason in EXPECTED.items():
        assert reason in seen[pair]


BY_SETTING = {
    "two heads": (("moon", {"projection": 6}), ("cosine", {}), "both claim the head"),
    "a slope beside sam": (("mix", {"form": "fedmix"}), ("sam", {}), "Use form=naive beside it"),
    "a slope by rows beside mixed features": (("mix", {"partner": "row"}), ("moex", {}), "Use partner=batch"),
    "cores beside local noise": (("apple", {}), ("dp", {"place": "local"}), "apple uploads whole models"),
    "models beside local noise": (("fomo", {}), ("dp", {"place": "local"}), "fomo uploads whole models"),
    "cores beside a bound": (("apple", {}), ("dp", {"noise": 0.0}), "apple uploads whole models"),
    "models beside a bound": (("fomo", {}), ("dp", {"noise": 0.0}), "fomo uploads whole models"),
    "lite beside scaffold": (("anchors", {"lite": True, "every": 2}), ("scaffold", {}), "models that travel only now and then"),
    "lite beside avgm": (("anchors", {"lite": True, "every": 5}), ("avgm", {}), "in every round"),
    "the same part twice": (("prox", {}), ("prox", {"mu": 1.0}), "the same part twice"),
}


@pytest.mark.parametrize("case", BY_SETTING)
def test_refusals_that_depend_on_settings(case: str) -> None:
    (a, a_settings), (b, b_settings), reason = BY_SETTING[case]
    with pytest.raises(RefusedCombination, match=reason):
        Method([PARTS[a](**a_settings), PARTS[b](**b_settings)])


def test_what_is_refused_by_setting_is_accepted_otherwise() -> None:
    Method([PARTS["moon"](), PARTS["cosine"]()])
    Method([PARTS["mix"](form="naive"), PARTS["sam"]()])
    Method([PARTS["mix"](partner="batch"), PARTS["moex"]()])
    Method([PARTS["mix"](form="naive", partner="row"), PARTS["moex"]()])
    Method([PARTS["mix"](form="naive"), PARTS["apfl"]()])
    Method([PARTS["anchors"](lite=True, every=1), PARTS["scaffold"]()])
    Method([PARTS["apple"](), PARTS["dp"](clip=None, noise=0.0)])
    Method([PARTS["fomo"](), PARTS["dp"](clip=None, noise=0.0)])


@pytest.mark.parametrize(("name", "settings", "hook"), [
    ("affine", {}, "relabel"), ("apfl", {}, "relabel"), ("mix", {"partner": "row"}, "relabel"), ("mix", {}, "gradient"),
    ("vhl", {}, "main_loss"), ("apple", {}, "release"), ("fomo", {}, "release"), ("dp", {}, "weights")])
def test_a_hook_that_settings_leave_unused_is_no_reason_to_refuse(name: str, settings: dict[str, Any], hook: str) -> None:
    @dataclass(frozen=True)
    class Other(Part):
        on: bool = True
        name = "other"

        @property
        def unused(self) -> frozenset[str]:
            return frozenset() if self.on else frozenset((hook,))
    setattr(Other, hook, lambda self, *given: None)
    with pytest.raises(RefusedCombination):
        Method([PARTS[name](**settings), Other()])
    Method([PARTS[name](**settings), Other(on=False)])


def test_two_main_losses_and_two_gradients_are_refused() -> None:
    class OtherLoss(PARTS["prox"]):      # type: ignore[misc, name-defined]
        name = "other"

        def main_loss(self, v):
            return 0.0

    class OtherGradient(PARTS["prox"]):  # type: ignore[misc, name-defined]
        name = "other"

        def gradient(self, v, grad_at):
            return grad_at(v.params)
    with pytest.raises(RefusedCombination, match="main_loss"):
        Method([PARTS["drift"](), OtherLoss()])
    with pytest.raises(RefusedCombination, match="gradient"):
        Method([PARTS["sam"](), OtherGradient()])


STACKS = (("prox", "scaffold", "anchors", "ffa", "prbm", "mr", "moon"), ("debias", "mixup", "scaffold", "sam"),
          ("cosine", "drift", "anchors", "bn"), ("ffa", "ditto", "bn", "mixup"), ("gen", "prbm", "mr"), ("rep", "mr", "prox"))


@pytest.mark.parametrize("names", STACKS, ids="+".join)
def test_larger_stacks_do_not_depend_on_the_order_of_typing(names: tuple[str, ...]) -> None:
    parts = [trial(PARTS[n]) for n in names]
    assert not differences(run_tiny(parts), run_tiny(parts[::-1]))
