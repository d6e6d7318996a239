"""Federations over data that are not all here: a site's over its own samples, the server's over none.

Both are made by the function that makes a simulation's, so method, model, initial values and keys are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import tree
from ...core.client import ClientState
from ...core.federation import Federation
from ...core.store import MemoryStore
from ...data import FederatedData
from ...data.federated import ClientRows, no_rows
from ...errors import DataError
from ...runs.run import build_federation
from .settings import FederationSettings


class Guest(MemoryStore):
    """Holds the state of one client and of nobody else."""

    def host(self, number: int, state: ClientState) -> None:
        self._pending, self._states = {}, {number: state}


def site_name(number: int) -> str:
    return f"site-{number}"


def _data(settings: FederationSettings, x: Tensor, y: Tensor, rows: Sequence[Tensor], names: Sequence[str]) -> FederatedData:
    a = settings.agreed
    clients = tuple(ClientRows(name, own, no_rows(), no_rows()) for name, own in zip(names, rows))
    about = {"vocabulary": {"size": a.vocabulary}} if a.vocabulary else {}
    return FederatedData("federation", x, y, a.classes, clients, transform=settings.make_transform(), description=about, task=a.task)


def _zeros(settings: FederationSettings) -> tuple[Tensor, Tensor]:
    a = settings.agreed
    x = torch.zeros(2, *a.sample, dtype=getattr(torch, a.input))
    return x, torch.zeros(2, *(a.sample[1:] if a.task == "segmentation" else ()), dtype=torch.int64)


def build_for_server(settings: FederationSettings, sizes: Sequence[int], names: Sequence[str] = ()) -> Federation:
    """The server's federation: sites have the sizes they declared, and samples of zeros that nobody looks at."""
    x, y = _zeros(settings)
    rows = [torch.zeros(1, dtype=torch.int64).expand(n) for n in sizes]
    config = settings.run.replace(device="cpu")
    return build_federation(config, _data(settings, x, y, rows, names or [site_name(i) for i in range(len(sizes))]))


def rehearse(settings: FederationSettings) -> Federation:
    """A federation of samples of zeros, one batch at every site: to see what the method's hooks send."""
    policy = settings.run.policy
    held = max([p.reserve for p in settings.run.stack().parts], default=0.0)
    enough = int(max(policy.batch, 2) / (1 - held)) + 2
    short = FederationSettings(settings.agreed, settings.run.replace(epochs=1, steps=None))
    return build_for_server(short, [enough] * settings.agreed.sites)


def build_for_site(settings: FederationSettings, number: int, data: FederatedData, device: str) -> Federation:
    """A site's federation: its own rows under its declared number, nothing under the others.

    A site that cannot fill a batch never trains, but is scored. A federation refuses to be built without anyone who could train,
    so a number that is not the site's then stands for one; nothing ever asks for it.
    """
    check_data(settings, data)
    own = data.clients[0].train
    every = torch.cat([own, data.clients[0].val, data.clients[0].test])
    if not len(every):
        raise DataError(f"The data of site {number} hold no samples.")
    rows = [no_rows() for _ in range(settings.agreed.sites)]
    rows[number] = own
    if len(own) < 2 * max(settings.run.policy.batch, 2) and settings.agreed.sites > 1:
        rows[(number + 1) % settings.agreed.sites] = every[:1].expand(4 * max(settings.run.policy.batch, 2))
    names = [site_name(i) for i in range(settings.agreed.sites)]
    fed = build_federation(settings.run.replace(device=device), _data(settings, data.x, data.y, rows, names))
    fed.clients, fed.prepared = Guest(fed.clients.fresh), True
    return fed


def check_data(settings: FederationSettings, data: FederatedData) -> None:
    """A site's data must be what the federation agreed on."""
    a = settings.agreed
    kind = str(data.x.dtype).removeprefix("torch.")
    if data.population != 1:
        raise DataError(f"A site's data must have one client, its own. Got {data.population}.")
    if tuple(data.x.shape[1:]) != a.sample or kind != a.input:
        raise DataError(f"The site's samples are {tuple(data.x.shape[1:])} {kind}, but the federation agreed on {a.sample} {a.input}.")
    if data.task != a.task:
        raise DataError(f"The site's data are for {data.task}, but the federation agreed on {a.task}.")
    if len(data.y) and int(data.y.max()) >= a.classes:
        raise DataError(f"The site has labels beyond the {a.classes} classes that the federation agreed on.")
    if a.vocabulary and len(data.x) and int(data.x.max()) >= a.vocabulary:
        raise DataError(f"The site has tokens beyond the {a.vocabulary} that the federation agreed on.")


def declaration(fed: Federation) -> str:
    """A hash of all names, shapes and types of state: where it differs, two sides do not run the same method or version."""
    everything = {"model": fed.model, "shared": fed.shared, "client": fed.clients.fresh.tensors}
    lines = [f"{path} {tuple(leaf.shape)} {leaf.dtype}" for path, leaf in tree.paths(everything)]
    travels = [k for half in fed.model.values() for k in half if k in fed.spec.shared]
    return hashlib.sha256("\n".join([*sorted(lines), "travels", *sorted(travels), "moves", *sorted(fed.moving)]).encode()).hexdigest()[:16]
