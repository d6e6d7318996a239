"""What a federation has agreed on, and what a site knows of itself.

`FederationSettings` come from Flower's run configuration (`[tool.flwr.app.config]`, the same for server and sites), `SiteSettings`
from a SuperNode's own `--node-config`. Both are flat: Flower hands over text, numbers and truth values under names such as
`lr` or `settings.dbe.kappa`. A hyphen and an underscore mean the same; "none" stands for nothing.

The app itself is a stub over the installed package:

    from consilience.engines.flower import client_app, server_app
    server = server_app()
    client = client_app()

The data of a site come from `consilience.federation.site.load_site(spec)`, where `spec` is the site's `data` setting: an adapter
written as a call, `folder(path=…)`, `arrays(path=…)` (.npz), `table(path=…)` (csv or parquet), or a Python entry point
`package.module:function`. It returns a `FederatedData` with exactly one client, whose `train`, `val` and `test` rows are the
site's. Its `transform` is not used: all sites transform as the federation declares (`transform`). Samples must have the
declared `sample` shape and `input` type, and labels lie in 0 … classes − 1.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ...core.policy import Policy
from ...data import transforms
from ...data.dataset import Dataset
from ...errors import ConfigError, did_you_mean
from ...metrics.criterion import ACCURACY
from ...metrics.measures.scores import Answered
from ...metrics.registry import installed_measures, make_measures
from ...options import build, check, option
from ...runs.config import RunConfig
from .scoring import Judge

# Settings of a run that a federation has as well. The others say where data come from or where steps run: each site's own affair.
RUN_NAMES = ("method", "model", "taps", "pretrained", "proxy", "rounds", "eval_every", "criterion",
             *(f.name for f in dataclasses.fields(Policy)))


@dataclass(frozen=True)
class _Agreed:
    """What a federation needs beside the settings of a run."""

    sites: int = option(3, "declared number of sites; they are numbered from 0, and keys are drawn from the numbers", low=1)
    sample: tuple[int, ...] = option((), "shape of one sample before the transform, as in 1,8,8")
    input: str = option("float32", "type of the samples before the transform", choices=("uint8", "float32", "int64"))
    classes: int = option(0, "number of classes", low=0)
    class_names: tuple[str, ...] = option((), "names of the classes, in order")
    feature_names: tuple[str, ...] = option((), "names of the columns, in order, where samples are rows of tables")
    task: str = option("classification", "what is learned", choices=("classification", "segmentation"))
    vocabulary: int | None = option(None, "number of tokens, where samples are text", low=1)
    transform: str = option("none", "what every site does to a batch, as in crop+flip+normalise(mean=(0.5,), std=(0.5,))")
    min_sites: int = option(2, "answers a round needs at least; capped by the number of sites selected", low=1)
    deadline: float = option(3600.0, "seconds a site has to answer; 0: no limit, a round waits for every node that is reachable", low=0.0)
    late: str = option("discard", "an answer after the deadline: discard it (the site goes back to the last round accepted from it), or "
                                  "wait for late ones as long as too few have answered, instead of trying the round again",
                       choices=("discard", "wait"))
    wait: float = option(600.0, "seconds to wait at the start for all sites to enrol; then those that did begin, if they are enough",
                         low=0.0)
    retries: int = option(5, "how often a round that too few answered is tried again before the run stops", low=0)
    retry_pause: float = option(10.0, "seconds before such a round is tried again", low=0.0)
    folder: str = option("", "the server's folder for checkpoints, records and models; a run started again with it goes on")
    allow_raw_averages: bool = option(False, "allow methods that send averages of raw samples to the server (FedBR, FedMix)")
    max_upload_mb: float = option(0.0, "largest answer of a site in MB; 0: what the method declares, and not a byte more", low=0.0)
    label: str = option("", "a name for this federation in its records")

    def __post_init__(self) -> None:
        check(self, "the federation")


_AGREED = {f.name for f in dataclasses.fields(_Agreed)}


@dataclass(frozen=True)
class FederationSettings:
    """The frozen, validated settings of a federation: what was agreed, and the run's own (method, model, policy, rounds)."""

    agreed: _Agreed = field(default_factory=_Agreed)
    run: RunConfig = field(default_factory=RunConfig)

    @staticmethod
    def names() -> list[str]:
        return sorted({*_AGREED, *RUN_NAMES, "settings.<part>.<option>"})

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> FederationSettings:
        """From loose values, as Flower's run configuration holds them; unknown names are refused with the nearest ones."""
        agreed: dict[str, Any] = {}
        run: dict[str, Any] = {"settings": {}}
        for given, value in values.items():
            name, dot, path = given.partition(".")
            name = name.replace("-", "_")
            if name == "settings" and dot:
                run["settings"][path] = value
            elif name == "settings" and isinstance(value, Mapping):
                run["settings"].update(value)
            elif dot or name not in {*_AGREED, *RUN_NAMES}:
                raise ConfigError(f"The federation has no setting {given!r}.{did_you_mean(given, cls.names())}")
            else:
                (agreed if name in _AGREED else run)[name] = value
        run = {k: v for k, v in run.items() if not (isinstance(v, str) and v.lower() in ("", "none"))}
        made = cls(build(_Agreed, agreed, "the federation"), RunConfig.make(run))
        made._check()
        return made

    def _check(self) -> None:
        a = self.agreed
        if not a.sample:
            raise ConfigError("The 'sample' setting of the federation is missing: the shape of one sample, as in sample=\"1,8,8\". "
                              "The server has no data to see it from.")
        if a.classes < 2:
            more = f" Name all classes in their order, as in class_names={a.class_names[0]},…" if a.class_names else ""
            raise ConfigError(f"The 'classes' setting of the federation must be at least 2. Got {a.classes} instead.{more}")
        if len(a.class_names) not in (0, a.classes):
            raise ConfigError(f"The federation has {a.classes} classes and names {len(a.class_names)} of them: {', '.join(a.class_names)}. "
                              "Name all in their order with class_names=…, those that some site lacks too.")
        if a.min_sites > a.sites and a.min_sites != _Agreed.min_sites:
            raise ConfigError(f"The 'min_sites' setting of the federation asks for {a.min_sites} answers, but there are {a.sites} sites.")
        self.run.policy.cohort_size(a.sites)                   # refuses an impossible cohort
        if self.run.policy.dropout:
            raise ConfigError("The 'dropout' setting lets clients of a simulation fail. Sites of a federation fail by themselves: leave it "
                              "out, and see min_sites and deadline.")
        self.make_transform()
        _ = self.judge
        self._refuse()

    def _refuse(self) -> None:
        """Methods that cannot run, or must be allowed, where data stay with their owners."""
        for part in self.run.stack().parts:
            if part.pools:
                raise ConfigError(f"{part.name} cannot run in a federation: it trains on the pooled data of all clients, and no data "
                                  "leave a site. Use it in simulation, as a reference.")
            if part.raw_averages and not self.agreed.allow_raw_averages:
                raise ConfigError(f"{part.name} cannot run in a federation unless every site allows it: {part.raw_averages}. If they all "
                                  "agree, set allow_raw_averages=true.")

    @property
    def least(self) -> int:
        """Answers a round needs."""
        return min(self.agreed.min_sites, self.run.policy.cohort_size(self.agreed.sites))

    @cached_property
    def judge(self) -> tuple[Judge, str] | None:
        """What sites score by beside accuracy, and what is to be said of it; None where accuracy is all."""
        text, a = self.run.run.criterion, self.agreed
        if text == ACCURACY:
            return None
        (one,) = make_measures([text])
        if a.task != "classification" or not isinstance(one, Answered) or not one.judges or (one.rows, one.training) != ("auto", "before"):
            able = [ACCURACY, *(name for name, cls in installed_measures().items() if issubclass(cls, Answered) and cls.judges)]
            raise ConfigError(f"A federation cannot be judged by {text!r}. Criteria, for labels, without rows or training: "
                              f"{', '.join(able)}.")
        classes = list(a.class_names) or [str(c) for c in range(a.classes)]
        if why := one.no_class(classes):
            raise ConfigError(f"A federation cannot be judged by {text!r}: {why}.")
        return one.scorer(classes)

    def make_transform(self) -> transforms.Pipeline:
        """What every site does to its batches."""
        a = self.agreed
        x = torch.zeros(1, *a.sample, dtype=getattr(torch, a.input))
        y = torch.zeros(1, *(a.sample[1:] if a.task == "segmentation" else ()), dtype=torch.int64)
        return transforms.make(a.transform, Dataset("federation", x, y, a.classes, task=a.task))

    def flat(self) -> dict[str, str | int | float | bool]:
        """As `[tool.flwr.app.config]` takes them: `make` reads them back. Defaults included."""
        run = {k: v for k, v in self.run.flat().items() if k in RUN_NAMES}
        options = {f"settings.{path}": value for path, value in self.run.settings.items()}
        return {k: _plain(v) for k, v in {**dataclasses.asdict(self.agreed), **run, **options}.items()}

    def digest(self) -> str:
        """A short hash of all that decides the numbers. Server and sites compare it before they work together."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        decides = {k: v for k, v in self.flat().items() if k in (*RUN_NAMES, "sites", "sample", "input", "classes", "task", "vocabulary",
                                                                 "transform") and k not in ("rounds", "eval_every")}
        if decides["criterion"] == ACCURACY:
            del decides["criterion"]                 # so that federations from before there was a choice go on
        # the label of a class, and the column of a number; where there are none, the hash is that of before names counted
        decides |= {name: said for name in ("class_names", "feature_names") if (said := self.flat()[name])}
        stack = self.run.portable()
        decides |= {"method": stack["method"], "settings": stack["settings"]}
        return hashlib.sha256(json.dumps(decides, sort_keys=True, default=list).encode()).hexdigest()[:16]


def _plain(value: Any) -> str | int | float | bool:
    """A value as TOML and Flower can hold it."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        plain = all("," not in (word := str(v)) and word == word.strip(" ()[]") for v in value)
        return ",".join(map(str, value)) if plain else json.dumps([str(v) for v in value], ensure_ascii=False)
    return value if isinstance(value, (bool, int, float)) else str(value)


@dataclass(frozen=True)
class SiteSettings:
    """What a site knows of itself; from the SuperNode's node configuration. None of it but number, name and sizes is ever sent."""

    site: int = option(-1, "the site's declared number, from 0", low=-1)
    data: str = option("", "where its samples come from: an adapter, or package.module:function")
    store: str = option("", "folder for what the site keeps between rounds; it must outlive the SuperNode")
    name: str = option("", "a name for records; without one, site-<number>")
    device: str = option("auto", "cpu, cuda, cuda:1 …; auto: cuda where there is one")
    threads: int = option(0, "threads of PyTorch on a CPU; 0: all cores it may use, 1: the very bits of the simulation", low=0)

    def __post_init__(self) -> None:
        check(self, "the site")

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> SiteSettings:
        """From a SuperNode's node configuration. Keys that others put there are left alone."""
        known = {f.name for f in dataclasses.fields(cls)}
        made = build(cls, {k.replace("-", "_"): v for k, v in values.items() if k.replace("-", "_") in known}, "the site")
        for name, given, how in (("site", made.site >= 0, "site=0"), ("data", bool(made.data), "data=\"arrays(path='/data/site.npz')\""),
                                 ("store", bool(made.store), "store=\"/var/lib/consilience\"")):
            if not given:
                raise ConfigError(f"The {name!r} setting of the site is missing. Start the SuperNode with --node-config '{how} …'.")
        return made

    @property
    def shown(self) -> str:
        """Its name as records show it."""
        return re.sub(r"[^\w.+-]+", "_", self.name)[:60] or f"site-{self.site}"
