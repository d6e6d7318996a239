"""`consilience federation demo`: a federation on this machine, and the same run in simulation, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import FederatedData
from ..report.tables import Table
from ..runs.files import read_tensors
from ..runs.result import Result
from ..runs.run import run_config
from .follow import Record, run_and_follow
from .loopback import Loopback, loopback, write_digits
from .site import join_sites, load_site

SETTINGS: dict[str, Any] = {"rounds": 6, "lr": 0.05, "batch": 10, "epochs": 1, "wait": 120.0, "deadline": 120.0, "min_sites": 3,
                            "transform": "normalise(mean=(0.305,), std=(0.376,))", "model": "digits_cnn"}
SPLIT = "dirichlet(alpha=0.3)"


@dataclass
class Demo:
    """What both runs gave."""

    method: str
    sites: list[FederatedData]
    records: list[Record]
    simulated: list[Record]
    difference: float                    # largest of any parameter of the global model

    def rows(self) -> list[dict[str, Any]]:
        out = []
        mine, theirs = self.records[-1]["personalised"]["per_client"], self.simulated[-1]["personalised"]["per_client"]
        for (name, real), same, data in zip(mine.items(), theirs.values(), self.sites):
            counts = torch.bincount(data.y, minlength=data.classes).tolist()
            out.append({"site": name, "samples": len(data.y), "labels": counts, "federation": real, "simulation": same,
                        "difference": real - same})
        return out

    def document(self) -> dict[str, Any]:
        last = self.records[-1]
        return {"method": self.method, "rounds": last["round"], "sites": self.rows(), "largest_parameter_difference": self.difference,
                "federation": {"accuracy": last["personalised"]["accuracy"], "loss": last["loss"]},
                "simulation": {"accuracy": self.simulated[-1]["personalised"]["accuracy"], "loss": self.simulated[-1]["loss"]},
                "bytes_up": sum(r["bytes_up"] for r in self.records), "bytes_down": sum(r["bytes_down"] for r in self.records),
                "seconds_per_round": [r["measured"]["seconds"] for r in self.records if r["round"]]}

    def table(self) -> Table:
        rows, data = [], self.rows()
        for row in data:
            rows.append([row["site"], str(row["samples"]), " ".join(map(str, row["labels"])), f"{row['federation']:.4f}",
                         f"{row['simulation']:.4f}", f"{row['difference']:+.1e}" if row["difference"] else "0"])
        last = self.records[-1]
        notes = [f"Accuracy on each site's own test samples after round {last['round']}; labels are how many of 0 to 9 a site has.",
                 f"Largest difference of a parameter of the global model between federation and simulation: {self.difference:.1e}."]
        if (last.get("privacy") or {}).get("epsilon") is not None:
            notes.append("They differ by the noise: the sites' is of their own secrets, the simulation's of the seed.")
        return Table(["site", "samples", "labels", "federation", "simulation", "difference"], rows,
                     f"{self.method} over three sites with TLS and node keys, and in simulation with the same keys", notes, data)


def digits_federation(folder: Path, values: dict[str, Any], *, insecure: bool = False, may_change: Sequence[str] = (),
                      say: Callable[[str], None] = lambda text: None) -> AbstractContextManager[Loopback]:
    """Three skewed parts of the digits as three sites, running."""
    adapters = write_digits(folder.absolute() / "data", 3, SPLIT)
    return loopback(folder.absolute(), {**SETTINGS, **values}, adapters, insecure=insecure, may_change=may_change, say=say)


def demo(method: str, folder: Path, *, values: dict[str, Any] | None = None, insecure: bool = False,
         say: Callable[[str], None] = lambda text: None, hear: Callable[[Record], None] = lambda record: None,
         warn: Callable[[str], None] = lambda text: None) -> Demo:
    """Make three skewed sites, train over real processes, then in simulation; everything started is stopped."""
    with digits_federation(folder, {**(values or {}), "method": method}, insecure=insecure, say=say) as federation:
        adapters = [running.site.data for running in federation.sites]
        say("training")
        settings, names = federation.settings, federation.settings.agreed.class_names
        document = run_and_follow(federation.launcher, federation.link, federation.app, folder / "run", hear=hear, note=warn)
        say("stopping the federation")
    say("running the same in simulation")
    sites = [load_site(a, number=i, classes=settings.agreed.classes, class_names=names) for i, a in enumerate(adapters)]
    same = simulate(settings, sites)
    trained = read_tensors(folder / "run" / "final" / "global.safetensors")
    return Demo(settings.run.stack().canonical, sites, document["records"], same.records, largest_difference(trained, same.global_model))


def simulate(settings: Any, sites: list[FederatedData]) -> Result:
    """What a federation's settings give in simulation on the same data, with the same keys."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                 # sums are then added in the order in which a site of one thread adds them
    try:
        data = dataclasses.replace(join_sites(sites), transform=settings.make_transform())
        return run_config(settings.run.replace(engine="sequential", device="cpu"), data=data)
    finally:
        torch.set_num_threads(threads)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((float((one[k].double() - other[k].double()).abs().max()) for k in one if one[k].numel()), default=0.0)
