"""A whole federation on one machine: a SuperLink and a SuperNode per site as separate processes, with TLS and node keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data import load
from ..engines.flower.settings import FederationSettings
from .app import app_hash, init, read_settings
from .approval import Approvals
from .certificates import NodeKey, make_certificates, make_key
from .commands import Site, SuperLink
from .launch import Launcher, RunningSite

POLL = 0.3                    # seconds between a SuperNode's questions for work: on one machine waiting is most of the time


@dataclass
class Loopback:
    """A running federation."""

    launcher: Launcher
    link: SuperLink
    app: Path
    sites: list[RunningSite]
    settings: FederationSettings


@contextlib.contextmanager
def loopback(folder: Path, values: dict[str, Any], data: Sequence[str], *, insecure: bool = False, may_change: Sequence[str] = (),
             say: Callable[[str], None] = lambda text: None) -> Iterator[Loopback]:
    """Start everything under `folder`; leaving the block stops everything. Keys and certificates that are there are used again.

    values      settings of the federation; the number of sites is that of the data.
    data        an adapter per site.
    may_change  settings that the sites let runs change.
    """
    app = folder / "app"
    if not app.exists():
        settings = init(app, {**values, "sites": len(data)}, like=data[0])
    else:
        settings = read_settings(app)
    stores = [folder / f"site-{i}" for i in range(len(data))]
    files = None
    if not insecure:
        say("making certificates and keys")
        there = folder / "certificates"
        files = make_certificates(there, ["localhost"], again=(there / "ca.key").exists())
        for store in stores:
            if not (store / "site.key").is_file():
                make_key(store)
    sha256 = app_hash(app)
    for store in stores:
        Approvals(store).approve(sha256, may_change)
    with Launcher(folder / "server", certificates=files, insecure=insecure) as launcher:
        say(f"starting the server{'' if insecure else ' with TLS'}")
        link = launcher.superlink()
        keys = [None if insecure else NodeKey(store / "site.key") for store in stores]
        if not insecure:
            say("admitting the sites' keys")
            launcher.register(link, *(k.public for k in keys if k))
        say(f"starting {len(data)} sites")
        sites = [launcher.site(Site(i, spec, store, link, k, threads=1, device="cpu", poll=POLL), wait=False)
                 for i, (spec, store, k) in enumerate(zip(data, stores, keys))]
        for running in sites:
            launcher.await_site(running)
        yield Loopback(launcher, link, app, sites, settings)


def write_digits(folder: Path, sites: int = 3, split: str = "dirichlet(alpha=0.3)", seed: int = 0) -> list[str]:
    """Differently skewed parts of the embedded digits, a file per site; the adapters that read them."""
    whole = load("digits", split, sites, seed)
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for i, client in enumerate(whole.clients):
        rows = np.sort(np.concatenate([part.numpy() for part in client[1:]]))
        path = folder / f"site-{i}.npz"
        np.savez(path, x=whole.x[rows].numpy(), y=whole.y[rows].numpy())
        out.append(f"arrays(path='{path.absolute()}', classes={whole.classes})")
    return out
