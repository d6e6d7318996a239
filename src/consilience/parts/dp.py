"""Clipping and Gaussian noise on everything a client uploads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import rng, tree
from ..core.client import ClientView
from ..core.method import Method
from ..core.part import Model, Part, Spec
from ..core.server import ServerView
from ..errors import ConfigError
from ..options import option
from ..privacy import accountant, ledger
from ..privacy.drowning import drowned
from ..privacy.noise import add_noise
from ..tree import Tree

SINGLE = ("stack", "concat")                  # reductions that show the server single clients' uploads
_ROUNDING = 1 - 1e-6                          # keeps the norm in float32 arithmetic below the bound


@dataclass(frozen=True)
class Dp(Part):
    """Differential privacy for whole clients: what a client uploads at once is scaled to norm C at most, and noise is added.

    The model's change, relative to the server's model, and all that other parts upload with it are one vector. Its sum over the
    clients of a round gets Gaussian noise of standard deviation z·C in every coordinate. Under a bound weights are uniform; statistics
    and counters of the model stay on the clients. What the parts upload before training is released, and counted, on its own.
    """

    clip: float | None = option(1.0, "C, the largest norm of what a client uploads at once; none: no bound", above=0.0,
                                tune=(0.1, 0.3, 1.0, 3.0))
    noise: float = option(1.0, "z, standard deviation of the noise on the sum over a round's clients, in units of C", low=0.0)
    place: str = option("client", "who adds the noise: client (each its share, so that the sum has z·C), server (all of it, on the sum) "
                                  "or local (each client all of it, so that single uploads are protected)",
                        choices=("client", "server", "local"))
    delta: float = option(1e-5, "δ at which ε is reported", above=0.0, below=1.0)
    scale: float = option(1.0, "factor on other parts' uploads inside the clipped vector: larger, less noise on them, more on the model",
                          above=0.0)

    name, rank, helps = "dp", 90, ("none: it protects clients, at the price of accuracy",)
    paper = "DP-FedAvg (McMahan et al., ICLR 2018); accounting: Balle and Wang (ICML 2018), Wang et al. (AISTATS 2019)"
    departs = ("cohorts have a fixed size; the paper draws each client by a coin of its own, so that its amplification does not apply",
               "one norm for everything uploaded at once; the paper also clips layer by layer")
    neutral, trial = {"clip": None, "noise": 0.0}, {"noise": 0.1}
    prefers = {"weights": "uniform"}

    @property
    def unused(self) -> frozenset[str]:
        return frozenset(("release", "publish", "account") if self.clip is None else ())

    @property
    def privacy(self) -> str:
        if self.clip is None:
            return "none: without a bound uploads leave as they are"
        if not self.noise:
            return "none: without noise clipping bounds a client's influence, but hides nothing"
        server = {"client": "the server sees single uploads with a share of the noise only, unless they are summed securely",
                  "server": "the server sees uploads without noise and is trusted to add it",
                  "local": "the server too sees nothing with less noise than that"}[self.place]
        return ("hides all the data of one client in what is published: models, and other parts' shared state. " + server +
                ". Not hidden: that a client took part, how many samples it has where a part sends counts, losses and scores it reports")

    # ---- what it stands beside -----------------------------------------------------------------------------------------

    def objection(self, other: Part) -> str | None:
        if not self.noise:
            return None
        if other.pools:
            return f"protects clients from each other, and {other.name} pools them into one"
        single = [f"{other.name}.{k}" for k, how in other.uploads.items() if how in SINGLE]
        single += ["single models"] if other.reads_models else []
        single += ["weights of single clients"] if Method.has(other, "weights") else []
        if Method.has(other, "choose") and self.place != "local":
            return (f"with place={self.place} counts on clients that are drawn by chance, and {other.name} chooses them; only place=local "
                    "does not")
        if single and self.place != "local":
            return (f"with place={self.place} protects sums over clients, and {other.name} makes the server read {', '.join(single)}; "
                    "only place=local protects those")
        return None

    def require(self, spec: Spec) -> str | None:
        if not self.noise:
            return None
        if self.clip is None:
            return "needs a bound for its noise to hide: set dp.clip."
        if spec.policy.weights != "uniform":
            return ("needs weights=uniform: weights by samples depend on the data of all clients, so that no bound on one client's "
                    "influence holds.")
        if not accountant.installed():
            return "counts ε with the package dp-accounting, which is not installed: pip install 'consilience[privacy]'."
        return None

    def caution(self, spec: Spec) -> str | None:
        if self.clip is None:
            return None
        clients = spec.policy.cohort_size(spec.population)
        deviation = self.noise * self.clip / clients ** (0.5 if self.place == "local" else 1.0)
        return drowned(deviation, self.clip, clients, [spec.model["params"][k] for k in spec.trained])

    def share(self, key: str, spec: Spec) -> bool:
        return not self.noise or key not in spec.model["buffers"]        # noise on variances and counters would be nonsense

    # ---- on a client ---------------------------------------------------------------------------------------------------

    def release(self, c: ClientView, uploads: dict[str, Tree], model: Model) -> tuple[dict[str, Tree], Model]:
        before, after = ({k: t for half in m.values() for k, t in half.items()} for m in (c.received, model))
        change = {k: after[k] - before[k] for k in c.moving if after[k].is_floating_point()}
        theirs = {path: self.scale * t for path, t in tree.paths(uploads) if self._is_number(path, t)}
        if not change and not theirs:
            return uploads, model
        vector = dict(zip([*change, *theirs], self._noisy(c, self._clipped([*change.values(), *theirs.values()]))))
        sent = {path: vector[path] / self.scale if path in theirs else t for path, t in tree.paths(uploads)}
        moved = {half: {k: before[k] + vector[k] if k in change else t for k, t in flat.items()} for half, flat in model.items()}
        return {**uploads, **tree.nested(sent)}, moved

    def _is_number(self, path: str, t: Tensor) -> bool:
        """Whether an upload can be scaled and noised. Whole numbers cannot, so that none may leave beside the noise."""
        if self.noise and not t.is_floating_point():
            raise ConfigError(f"dp cannot protect the upload {path!r}: it holds whole numbers, which can be neither scaled nor noised.")
        return t.is_floating_point()

    def _clipped(self, vector: list[Tensor]) -> list[Tensor]:
        """The vector, its norm at most C."""
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t.double()) for t in vector]))
        factor = ((self.clip or 0.0) * _ROUNDING / norm).clamp(max=1.0)
        return [t * factor.to(t.dtype) for t in vector]

    def _noisy(self, c: ClientView, vector: list[Tensor]) -> list[Tensor]:
        share = {"server": 0.0, "client": c.expected**-0.5, "local": 1.0}[self.place]
        return add_noise(vector, self.noise * (self.clip or 0.0) * share, c.key, c.secret, "client")

    # ---- on the server -------------------------------------------------------------------------------------------------

    def publish(self, s: ServerView, owner: str, reduced: Tree, how: Mapping[str, str]) -> Tree:
        """place=server: noise on sums, and on averages as much as their divisor leaves of it."""
        if self.place != "server" or not self.noise:
            return reduced
        out = {}
        for k, value in reduced.items():
            over = (1 if how.get(k) == "sum" else len(s.ids)) * (self.scale if owner else 1.0)
            deviation, key = self.noise * (self.clip or 0.0) / over, rng.key(s.key, owner, k)
            noisy = iter(add_noise(tree.leaves(value), deviation, key, s.secret, "server"))
            out[k] = tree.map(lambda _, noisy=noisy: next(noisy), value)
        return out

    def init_server(self, spec: Spec) -> Tree:
        return ledger.fresh(spec.population)

    def account(self, s: ServerView, releases: Mapping[str, list[int]]) -> tuple[dict[str, Any], Tree]:
        cohort = s.spec.policy.cohort_size(s.population)
        now = ledger.record(s.server, releases, s.asked, noise=self.noise, place=self.place, cohort=cohort, population=s.population)
        sampled = cohort < s.population and self.place != "local" and not s.secret
        return ledger.report(now, delta=self.delta, sampled=sampled, secret=bool(s.secret)), now
