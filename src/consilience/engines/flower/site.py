"""A site's side: one answer for one request, from data that never leave it.

Whatever it does, it does with the state of the last round that the server accepted from it. What it sends back is what the
method's parts upload, the travelling and moving part of the model, a mean loss, counts and sums; nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch

from ... import tree
from ...core.client import consult, train_client
from ...data import FederatedData
from ...engines.choose import choose
from ...engines.hardware import usable_cores
from ...errors import ConfigError, ConsilienceError
from .broadcast import Receiver
from .build import Guest, build_for_site, declaration
from .parcel import Parcel, Refused, whole_number
from .scoring import score_site
from .settings import FederationSettings, SiteSettings
from .versions import Versions

log = logging.getLogger("consilience.federation")
PROTOCOL = 1


class Site:
    """One site in one federation's settings. It may serve several runs of them, told apart by their tokens."""

    def __init__(self, settings: FederationSettings, own: SiteSettings, data: FederatedData) -> None:
        if own.site >= settings.agreed.sites:
            raise ConfigError(f"The 'site' setting of the site is {own.site}, but the federation has the sites 0 to "
                              f"{settings.agreed.sites - 1}.")
        self.settings, self.own, self.number = settings, own, own.site
        self.fed = build_for_site(settings, own.site, data, own.device)
        if self.fed.device.type == "cuda":
            choose("auto", self.fed).settle(self.fed)
        mine = data.clients[0]
        self.rows = {"test": mine.test, "val": mine.val}
        self.sizes = {"train": len(mine.train), "val": len(mine.val), "test": len(mine.test)}
        self._receivers: dict[str, Receiver] = {}
        self._one_at_a_time = threading.Lock()

    def answer(self, request: Parcel) -> Parcel:
        """The answer to any request. What goes wrong is told to the server in words of ours, in detail to the site's own log."""
        started = time.perf_counter()
        envelope = {k: request.about.get(k) for k in ("federation", "task", "round")}
        envelope |= {"site": self.number, "sizes": self.sizes}
        try:
            with self._one_at_a_time, self._threads(), torch.no_grad():
                about, tensors = self._answer(request)
        except Refused as error:
            log.error("Site %d cannot answer %s: %s", self.number, request.about.get("task"), error)
            about, tensors = {"error": str(error)}, {}
        except ConsilienceError as error:        # names files of the site
            log.error("Site %d cannot answer %s: %s", self.number, request.about.get("task"), error)
            about, tensors = {"error": f"it has met a {type(error).__name__}; the site's log has the details"}, {}
        except Exception as error:               # its text could quote data, so only its kind is sent
            log.exception("Site %d failed in %s", self.number, request.about.get("task"))
            about, tensors = {"error": f"an unexpected {type(error).__name__}; the site's log has the details"}, {}
        return Parcel.of({**envelope, **about, "seconds": round(time.perf_counter() - started, 3)}, tensors)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.own.threads or usable_cores())
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _answer(self, request: Parcel) -> tuple[dict[str, Any], tree.Tree]:
        about = request.about
        if about.get("protocol") != PROTOCOL:
            raise Refused(f"the server speaks protocol {about.get('protocol')}, this site {PROTOCOL}. Install the same version of "
                          "consilience on both.")
        if about.get("digest") != self.settings.digest():
            raise Refused("the server runs other settings than this site was given")
        task = about.get("task")
        if task == "hello":
            return {"name": self.own.shown, "declaration": declaration(self.fed),
                    "version": version("consilience")}, {}
        if about.get("site") != self.number:
            raise Refused(f"asked was site {about.get('site')}, this is site {self.number}")
        versions = Versions(self.own.store, str(about.get("federation")), self.number, self.fed.clients.fresh)
        if not self._receive(request, versions):
            return {"missing": True}, {}
        work = {"consult": self._consult, "train": self._train, "score": self._score}.get(str(task))
        if work is None:
            raise Refused(f"the task {str(task)[:40]!r} is not known")
        log.info("Site %d, round %s: asked to %s.", self.number, about.get("round"), task)
        self.fed.round_number, self.fed.last_exchange = whole_number(about, "round"), whole_number(about, "last_exchange")
        if self.fed.round_number > self.settings.run.run.rounds:            # what leaves the site grows with every round
            raise Refused(f"round {self.fed.round_number} is asked, and what was approved here has {self.settings.run.run.rounds}")
        self.fed.secret = versions.secret() if self.fed.method.using("release") else b""
        assert isinstance(self.fed.clients, Guest)
        self.fed.clients.host(self.number, versions.at(whole_number(about, "accepted")))
        return work(request, versions)

    def _receive(self, request: Parcel, versions: Versions) -> bool:
        """Take in the broadcast; False where the server believes that something is here that is not."""
        token, listed = str(request.about["federation"]), request.about.get("broadcast") or {}
        receiver = self._receivers.setdefault(token, Receiver(versions.held()))
        before = receiver.arrays
        if not receiver.receive(listed, {k: raw for k, raw in request.arrays.items() if not k.startswith("download/")}):
            return False
        if receiver.arrays != before:
            versions.hold(receiver.tensors())
        receiver.settle(self.fed)
        return True

    def _cohort(self, about: dict[str, Any]) -> list[int]:
        cohort = about.get("cohort")
        if not isinstance(cohort, list) or self.number not in cohort:
            raise Refused("the request names no cohort with this site in it")
        return cohort

    def _consult(self, request: Parcel, versions: Versions) -> tuple[dict[str, Any], tree.Tree]:
        about = request.about
        part, stage = str(about.get("part")), str(about.get("stage"))
        if stage not in ("prepare", "survey") or part not in [p.name for p in self.fed.method.using(stage)]:
            raise Refused(f"no part {part[:40]!r} is asked in {stage[:40]!r}")
        return {}, consult(self.fed, self.number, (part, stage, self._cohort(about)), None)

    def _train(self, request: Parcel, versions: Versions) -> tuple[dict[str, Any], tree.Tree]:
        fed = self.fed
        order = request.about.get("download") or []
        download = tree.nested({path: request.arrays[f"download/{path}"].read_any(path).to(fed.device) for path in order})
        outcome = train_client(fed, self.number, self._cohort(request.about), download)
        for what, tensors in (("model", outcome.model), ("uploads", outcome.uploads), ("state", outcome.state.tensors),
                              ("loss", {"loss": outcome.losses})):
            if not bool(tree.all_finite(tensors)):
                raise Refused(f"training became non-finite in round {fed.round_number} ({what}); nothing was kept of it")
        versions.write(fed.round_number, outcome.state, whole_number(request.about, "accepted"))
        flat = {**outcome.model["params"], **outcome.model["buffers"]}
        model = tree.pick(flat, fed.moving) if fed.models_travel else {}
        loss = 0.0 if fed.method.using("release") else float(outcome.losses.mean())      # no noise would hide it
        return {"loss": loss}, {"uploads": outcome.uploads, "model": model}

    def _score(self, request: Parcel, versions: Versions) -> tuple[dict[str, Any], tree.Tree]:
        scores = score_site(self.fed, self.number, self.rows, self.settings.judge and self.settings.judge[0])
        for model, by_rows in scores.items():
            for rows, sums in by_rows.items():
                if not math.isfinite(sums.get("loss", 0.0)):
                    raise Refused(f"the loss of the {model} model on its {rows} rows is not finite in round {self.fed.round_number}")
        return {"scores": scores}, {}
