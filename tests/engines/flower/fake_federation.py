"""A federation in one process: the server's and the sites' own code, with a link that calls functions instead of a network.

Every parcel still becomes JSON and bytes on its way, as on a wire.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from consilience import rng, tree
from consilience.core.federation import Federation
from consilience.data import FederatedData
from consilience.data.federated import ClientRows
from consilience.engines.flower.parcel import Parcel, Raw, Refused, Silent, read_about, write_about
from consilience.engines.flower.server import Server
from consilience.engines.flower.settings import FederationSettings, SiteSettings
from consilience.engines.flower.site import Site
from consilience.engines.flower.versions import Versions
from consilience.runs.run import build_federation

SIZES = (24, 17, 5, 40)                      # site 2 cannot fill a batch of 8: it is scored, but never trains
CLASSES = 3
COMMON: dict[str, Any] = {"sites": len(SIZES), "sample": "1,8,8", "classes": CLASSES, "batch": 8, "epochs": 1, "lr": 0.05, "rounds": 3,
                          "model": "digits_cnn", "allow_raw_averages": True, "min_sites": 2, "retry_pause": 0.0, "wait": 0.0,
                          "retries": 1}
# settings that make short runs meaningful
QUICK: dict[str, dict[str, Any]] = {"fedfm": {"settings.anchors.start": 1}, "fedgen": {"settings.gen.steps": 2, "settings.gen.noise": 4,
                                                                                      "settings.gen.hidden": 8}}


def site_data(number: int, size: int | None = None) -> FederatedData:
    """Small images whose class and site show in their brightness; a third as many rows again for tests."""
    n = SIZES[number] if size is None else size
    total = n + max(n // 3, 2)
    y = rng.integers(rng.key(7, "labels", number), CLASSES, (total,))
    x = rng.normal(rng.key(7, "pixels", number), (total, 1, 8, 8)) + 0.5 * y[:, None, None, None] + 0.3 * number
    rows = ClientRows("own", torch.arange(n), torch.arange(n, n + 1), torch.arange(n + 1, total))
    return FederatedData("own", x, y, CLASSES, (rows,))


def joined(settings: FederationSettings) -> FederatedData:
    """The same samples as a simulation has them."""
    sites = [site_data(i) for i in range(settings.agreed.sites)]
    starts = [sum(len(s.x) for s in sites[:i]) for i in range(len(sites))]
    clients = tuple(ClientRows(f"site-{i}", *(rows + starts[i] for rows in s.clients[0][1:])) for i, s in enumerate(sites))
    return FederatedData("federation", torch.cat([s.x for s in sites]), torch.cat([s.y for s in sites]), CLASSES, clients,
                         transform=settings.make_transform())


def simulate(settings: FederationSettings, cohorts: Sequence[Sequence[int] | None] = ()) -> Federation:
    fed = build_federation(settings.run.replace(device="cpu"), joined(settings))
    for cohort in cohorts or [None] * settings.run.run.rounds:
        fed.round(cohort)
    return fed


Fault = Callable[[int, Parcel, Callable[[], Parcel]], "Parcel | Refused | None"]


class FakeLink:
    """Nodes are numbers; node 100 + i is site i. `fault` may answer in a site's place, or let it work and lose the answer."""

    def __init__(self, sites: Mapping[int, Site], fault: Fault | None = None) -> None:
        self.sites = {100 + i: site for i, site in sites.items()}
        self.away: set[int] = set()
        self.fault, self.asked = fault, list[tuple[str, int, int]]()

    def nodes(self) -> list[int]:
        return [node for node in self.sites if node not in self.away]

    def ask(self, requests: Mapping[int, Parcel], task: str, seconds: float, least: int) -> Iterator[tuple[int, Parcel | Refused]]:
        for node, request in requests.items():
            self.asked.append((task, node - 100, request.about["round"]))
            work = lambda node=node, request=request: travelled(self.sites[node].answer(travelled(request)))
            answer = self.fault(node - 100, request, work) if self.fault else work()
            yield node, (Silent("no answer in time") if answer is None else answer)


def travelled(parcel: Parcel) -> Parcel:
    """As it comes out at the other end, in an order of its own."""
    arrays = {name: Raw(str(raw.dtype), tuple(raw.shape), bytes(raw.data)) for name, raw in sorted(parcel.arrays.items())}
    return Parcel(read_about(write_about(json.loads(json.dumps(parcel.about)))), arrays)


class Fake:
    """A federation and its sites, in a folder."""

    def __init__(self, folder: Path, method: str = "fedavg", fault: Fault | None = None, **settings: Any) -> None:
        quick = {k: v for name, values in QUICK.items() if name in method.split("+") for k, v in values.items()}
        values = {**COMMON, **quick, "method": method, **settings}
        self.folder, self.settings = folder, FederationSettings.make({"folder": str(folder / "server"), **values})
        self.sites = {i: self.site(i) for i in range(self.settings.agreed.sites)}
        self.link = FakeLink(self.sites, fault)
        self.server: Server | None = None

    def site(self, number: int, data: FederatedData | None = None) -> Site:
        """As a SuperNode that is started anew would build it."""
        own = SiteSettings(number, "given", str(self.folder / f"store{number}"), threads=1, device="cpu")
        return Site(self.settings, own, data or site_data(number))

    def restart(self, number: int) -> None:
        self.sites[number] = self.link.sites[100 + number] = self.site(number)

    def run(self, **how: Any) -> list[dict[str, Any]]:
        self.server = Server(self.settings, self.link, pause=lambda seconds: None, **how)
        return self.server.run()

    @property
    def fed(self) -> Federation:
        assert self.server is not None
        return self.server.fed

    def state(self, number: int) -> tree.Tree:
        """What a site keeps, as of the last round accepted from it."""
        return self.versions(number).at(self.fed.client(number).own_round).tensors

    def versions(self, number: int) -> Versions:
        assert self.server is not None
        return Versions(self.folder / f"store{number}", self.server.roster.token, number, self.sites[number].fed.clients.fresh)


def unequal(fake: Fake, simulated: Federation, sites: Sequence[int] | None = None) -> list[str]:
    """Paths of tensors that differ in any bit from the simulation's: model and shared and server state, and what sites keep."""
    pairs = [({"model": fake.fed.model, "shared": fake.fed.shared, "server": fake.fed.server},
              {"model": simulated.model, "shared": simulated.shared, "server": simulated.server})]
    pairs += [({f"site{i}": fake.state(i)}, {f"site{i}": simulated.client(i).tensors}) for i in (fake.sites if sites is None else sites)]
    out = []
    for one, other in pairs:
        a, b = dict(tree.paths(one)), dict(tree.paths(other))
        out += sorted(a.keys() ^ b.keys()) + [k for k in a.keys() & b.keys() if not torch.equal(a[k], b[k])]
    return out
