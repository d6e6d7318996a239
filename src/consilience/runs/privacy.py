"""What a method tells the server: which uploads are sums, which are read client by client, and what its settings protect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core import returned
from ..core.federation import Federation
from ..core.method import Method

SUMS = ("sum", "mean", "weighted")       # reductions that secure aggregation could compute without seeing one upload


def disclosures(fed: Federation, rounds: int) -> dict[str, Any]:
    """A JSON-able account of what leaves the clients and what the method says of its protection."""
    uploads = [{"part": p.name, "upload": k, "reduced": how, "sum": how in SUMS} for p in fed.method.parts for k, how in p.uploads.items()]
    return {"model": _model(fed), "uploads": uploads, "secure_aggregation": _why_not(fed) or None,
            "raw_averages": {p.name: p.raw_averages for p in fed.method.parts if p.raw_averages},
            "protects": {p.name: p.privacy for p in fed.method.parts if p.privacy}, "forecast": forecast(fed, rounds)}


def _model(fed: Federation) -> dict[str, Any]:
    """How the model's change is put together, and why that is more than a sum, if it is."""
    if not fed.moving:
        return {"travels": False, "sum": True, "why": "nothing of the model travels"}
    reading = [p.name for p in fed.method.parts if p.reads_models]
    weighing = [p.name for p in fed.method.using("weights")]
    counters = [k for k in fed.moving if k in fed.model["buffers"] and not fed.model["buffers"][k].is_floating_point()]
    why = (f"{', '.join(reading)} reads single clients' models on the server" if reading else
           f"{', '.join(weighing)} sets single clients' weights on the server" if weighing else
           f"of counters such as {counters[0]} the largest is taken; batchnorm=params or local keeps them on the clients"
           if counters else "")
    return {"travels": True, "sum": not why, "why": why or "an average of the clients' models"}


def _why_not(fed: Federation) -> list[str]:
    """What secure aggregation of everything would prevent; empty where sums are all the method needs."""
    model = _model(fed)
    single = [f"the server reads {p.name}.{k} client by client ({how})" for p in fed.method.parts for k, how in p.uploads.items()
              if how not in SUMS]
    return ([] if model["sum"] else [model["why"]]) + single


def forecast(fed: Federation, rounds: int) -> dict[str, Any] | None:
    """(ε, δ) after so many rounds in which every client of the cohort answers, for one that takes part in all; None without a count."""
    counting = fed.method.using("account")
    if not counting:
        return None
    population = list(range(fed.size))
    cohort = population[: fed.policy.cohort_size(fed.size)]
    servers = {p.name: p.init_server(fed.spec) for p in counting}        # by name, for a part may hold a list and then has no hash
    said: dict[str, Any] = {}

    def count(number: int, ids: list[int], releases: dict[str, list[int]]) -> None:
        nonlocal said
        said = {}
        for part in counting:
            view = replace(fed.serve(part, "account", ids), round=number, server=servers[part.name], asked=dict.fromkeys(releases, ids))
            said, servers[part.name] = returned.accounted(part, part.account(view, releases), said)
    if preparing := fed.method.using("prepare"):
        count(0, population, {f"prepare {p.name}": population for p in preparing if p.uploads})
    surveys = {f"survey {p.name}": cohort for p in fed.method.using("survey") if p.uploads}
    for number in range(1, rounds + 1):
        count(number, cohort, surveys | ({"finish": cohort} if fed.moving or _uploads_at_the_end(fed.method) else {}))
    return {"rounds": rounds, **said}


def _uploads_at_the_end(method: Method) -> bool:
    return any(p.uploads for p in method.using("finish"))


def privacy_line(said: dict[str, Any] | None) -> str:
    """(ε, δ) in words; what a part of the user's counts in its own way as it stands."""
    if not said:
        return ""
    if "epsilon_replace" not in said:
        return "; ".join(f"{name} {value}" for name, value in said.items() if name != "rounds")
    if said["epsilon"] is None:
        return "no guarantee: uploads are clipped, but without noise"
    also = [f"{said['epsilon_replace']:.2f} if its data are replaced by others"]
    if said["epsilon_sampled"] is not None:
        also.append(f"at most {said['epsilon_sampled']:.2f} of that kind for whoever does not know which clients took part")
    server = "the server sees uploads without noise" if said["epsilon_server"] is None else \
        f"single uploads, as the server sees them: ε = {said['epsilon_server']:.2f}"
    kind = "noise from the sites' own secrets" if said["noise"] == "secret" else "noise keyed by the seed, so not secret: a simulation"
    most = f"ε = {said['epsilon']:.2f} at δ = {said['delta']:g} for the client with most releases ({said['releases']})"
    return "; ".join([most, *also, server, kind])
