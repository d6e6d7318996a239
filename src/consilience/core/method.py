"""A method: parts in the order of their ranks, checked against each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..errors import ConfigError, RefusedCombination, did_you_mean
from . import returned
from .part import EXCLUSIVE, HOOKS, OWN_STEPS, STEP_HOOKS, TASK_HOOKS, Part, Phase
from .policy import Policy


class Method:
    """A stack of parts. The order of typing does not matter; the parts' ranks and names fix the order of every fold."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.parts: tuple[Part, ...] = tuple(sorted(parts, key=lambda p: (p.rank, p.name)))
        for part in self.parts:
            for name in sorted(part.unused - {*HOOKS}):
                raise ConfigError(f"Part {part.name!r} calls {name!r} unused, which is no hook.{did_you_mean(name, HOOKS)}")
            for name in sorted(part.prefers.keys() - {"weights"}):
                raise ConfigError(f"Part {part.name!r} prefers a {name!r}, which nothing would come of: `prefers` says 'weights' alone.")
        for i, a in enumerate(self.parts):
            for b in self.parts[i + 1:]:
                reason = self.conflict(a, b)
                if reason:
                    raise RefusedCombination(f"{a.name} and {b.name} cannot be combined: {reason}.")

    @classmethod
    def conflict(cls, a: Part, b: Part) -> str | None:
        """Why two parts cannot stand together, or None."""
        if a.name == b.name:
            return "the same part twice"
        for one, other in ((a, b), (b, a)):
            objection = one.objection(other)
            if objection:
                return f"{one.name} {objection}"
            for trait in sorted(one.refuses.keys() & other.traits):
                return f"{other.name} has {trait}, and {one.name} {one.refuses[trait]}"
        for claim in sorted(a.claims.keys() & b.claims.keys()):
            return f"both claim the {claim} ({a.name} {a.claims[claim]}; {b.name} {b.claims[claim]})"
        for hook in EXCLUSIVE:
            if cls.has(a, hook) and cls.has(b, hook):
                return f"both define `{hook}`, and only one part can"
        return None

    @staticmethod
    def has(part: Part, hook: str) -> bool:
        return getattr(type(part), hook) is not getattr(Part, hook) and hook not in part.unused

    def using(self, hook: str, model: str | None = None) -> list[Part]:
        return [p for p in self.parts if self.has(p, hook) and model in (None, p.acts_on)]

    @property
    def stepping_apart(self) -> tuple[str, ...]:
        """Names of the parts that make steps of their own."""
        return tuple(p.name for p in self.parts if any(self.has(p, hook) for hook in OWN_STEPS))

    def trained_apart(self, key: str) -> bool:
        """Whether a parameter is one that such a part attached: its own steps train it, and no phase."""
        return key.startswith(tuple(name + "." for name in self.stepping_apart))

    def hooks(self, phase: Phase, uploads: bool) -> dict[str, list[Part]]:
        """hook -> the parts that act in this phase; those with `terms` of its loss; those with `corrections` of its gradient. Statistics
        and adversaries follow only what will be uploaded.
        """
        active = {h: self.using(h) for h in TASK_HOOKS} | {h: self.using(h, phase.model) for h in STEP_HOOKS}
        active["terms"] = [p for p in self.parts if p in active["loss"] or p in active["correction"]]
        active["corrections"] = [p for p in self.parts if p in active["correction"] or p in active["grad"]]
        active["tap"] = [p for p in self.using("tap") if p.in_every_pass or p.acts_on == phase.model]
        return active if uploads else active | {"track": [], **{hook: [] for hook in OWN_STEPS}}

    @property
    def skips_exchanges(self) -> bool:
        """Whether there are rounds after which models do not travel, so that clients go on from their own."""
        return any(p.skips_exchanges for p in self.parts)

    def exchanges(self, round_number: int) -> bool:
        """Whether models travel to the server at the end of this round."""
        return all(returned.decision(p, "exchange", p.exchange(round_number)) for p in self.using("exchange"))

    def resolve(self, policy: Policy) -> Policy:
        """The run's policy with `weights=auto` replaced by what the parts prefer: nothing at a neutral setting, which is FedAvg."""
        if policy.weights != "auto":
            return policy
        wanted = {p.name: p.prefers["weights"] for p in self.parts if "weights" in p.prefers and not p.at_neutral}
        values = set(wanted.values())
        if len(values) > 1:
            raise ConfigError(f"Parts prefer different weights: {wanted}. Set weights explicitly.")
        return replace(policy, weights=values.pop() if values else "samples")
