"""Every pair of parts: refused for a printed reason, or it trains and its order of typing changes no bit."""

from __future__ import annotations

import pytest

from consilience.core.method import Method
from consilience.errors import RefusedCombination
from consilience.parts import PARTS
from consilience.testing import check_pair, differences, run_tiny, trial

NAMES = sorted(PARTS)

# METHODS.md 10.6, and what follows from the parts' own nature. A pair that joins or leaves this list is a decision.
_NEEDS_AN_AVERAGE = ("avgm", "cm", "dro", "dyn", "nova", "scaffold")
_PERSONAL = ("babu", "bn", "ditto", "per", "prbm", "rep")
REFUSED: dict[str, str] = {
    **{f"{name}+fomo": "fomo has no global model" for name in _NEEDS_AN_AVERAGE},
    **{f"{name}+local": "local has no global model" for name in _NEEDS_AN_AVERAGE},
    **{f"{name}+union": f"{name} has personal models" for name in _PERSONAL},
    "local+union": "local has no global model",
    "dann+union": "dann has a comparison of clients",
    "fomo+union": "fomo has a comparison of clients",
    "fomo+local": "both claim the question of what travels",
    **{f"gen+{name}": f"{name} has local head" for name in ("fomo", "local", "per", "rep")},
    "babu+cosine": "babu has a frozen random head",
    "cosine+vhl": "vhl has extra outputs",
    "babu+rep": "both claim the phases of the model",
    "babu+ditto": "both define `personalise`",
    "mixup+ntd": "mixup has soft labels",
    **{"+".join(sorted(("dp", name))): "only place=local protects those" for name in ("debias", "dro", "ffa", "fomo", "gen", "nova")},
    "dp+union": "union pools them into one",
}
EXPECTED = {frozenset(pair.split("+")): reason for pair, reason in REFUSED.items()}


@pytest.mark.parametrize("first", NAMES[:-1])
def test_pairs_with(first: str) -> None:
    """One test for a part and all parts after it in the alphabet."""
    a = trial(PARTS[first])
    for second in NAMES[NAMES.index(first) + 1:]:
        ran = check_pair(a, trial(PARTS[second]))
        assert ran == (frozenset((first, second)) not in EXPECTED), f"{first}+{second} is {'accepted' if ran else 'refused'}"


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
    Method([PARTS["anchors"](lite=True, every=1), PARTS["scaffold"]()])


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
