"""What a stack is made of: parts, hooks, state by home with shapes and bytes, traffic, references, departures, choices."""

from __future__ import annotations

from typing import Any

from .. import tree
from ..core.federation import Federation
from ..core.method import Method
from ..core.part import EXCLUSIVE, HOOKS, Part
from ..options import describe
from ..parts.presets import PRESETS
from ..parts.registry import installed_parts
from ..parts.stack import Stack, forwarded
from .privacy import SUMS, disclosures
from .scoring import cautions_of

HOMES = {"shared": "on the server, sent to clients", "server": "on the server, never sent", "kept": "on a client, between rounds",
         "personal": "on a client, trained, never sent", "local": "parts of the model that never leave a client",
         "previous": "on a client: its last trained model", "own": "on a client: its model between two exchanges",
         "optimiser": "on a client: its optimiser's state"}


def idea_of(cls: type[Part]) -> str:
    """The first paragraph of a part's docstring."""
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())


def describe_part(part: Part) -> dict[str, Any]:
    cls = type(part)
    hooks = [h for h in HOOKS if Method.has(part, h)]
    options = [{**row, "value": getattr(part, row["name"])} for row in describe(cls)]
    return {"name": part.name, "idea": idea_of(cls), "paper": cls.paper, "hooks": hooks, "options": options, "helps": list(cls.helps),
            "departs": list(cls.departs), "neutral": dict(cls.neutral) if cls.neutral is not None else None,
            "not_neutral": cls.not_neutral or None, "raw_averages": part.raw_averages or None, "privacy": part.privacy or None,
            "uploads": {k: {"reduced": how, "secure_aggregation": how in SUMS} for k, how in part.uploads.items()}}


def _leaves(state: Any) -> list[dict[str, Any]]:
    return [{"path": path, "shape": list(t.shape), "bytes": t.numel() * t.element_size()} for path, t in tree.paths(state)]


def explain(stack: Stack, fed: Federation, rounds: int = 1) -> dict[str, Any]:
    """A JSON-able description of a method on a model. `rounds` are those for which what they would tell is forecast."""
    fresh = fed.clients.fresh.tensors
    homes = {"shared": fed.shared, "server": fed.server, **{h: fresh[h] for h in ("kept", "personal", "local", "previous", "own",
                                                                                 "optimiser")}}
    warnings = cautions_of(fed, rounds)
    first, later = _traffic(fed)
    return {"method": stack.canonical, "parts": [describe_part(p) for p in fed.method.parts],
            "phases": [{"name": p.name, "model": p.model, "keys": len(p.keys), "epochs": p.epochs} for p in fed.phases],
            "model": {"parameters": sum(t.numel() for t in fed.model["params"].values()),
                      "buffers": sum(t.numel() for t in fed.model["buffers"].values()),
                      "travels": sum(t.numel() for k, t in (fed.model["params"] | fed.model["buffers"]).items() if k in fed.spec.shared)},
            "state": {home: {"where": HOMES[home], "bytes": tree.count_bytes(state), "tensors": _leaves(state)}
                      for home, state in homes.items() if tree.leaves(state)},
            "traffic": {"first_round": first, "later_rounds": later}, "privacy": disclosures(fed, rounds), "resolves": _choices(fed),
            "warnings": warnings}


def _traffic(fed: Federation) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per client that a first and a third round move, counted by running them on this federation.

    Every round begins with the model of the first: what a model has come to moves no bytes, and with much noise it may come to nothing.
    """
    prepared = fed.prepare()
    reports, model = [], fed.model
    for _ in range(3):
        fed.model = model
        reports.append(fed.round())
    many = max(len(reports[0].cohort), 1)
    first = {"up": (reports[0].bytes_up + prepared.bytes_up) // many, "down": (reports[0].bytes_down + prepared.bytes_down) // many}
    many = max(len(reports[2].cohort), 1)
    return first, {"up": reports[2].bytes_up // many, "down": reports[2].bytes_down // many}


def _choices(fed: Federation) -> list[str]:
    """How this stack settles what its parts leave open together."""
    out = [f"aggregation weights: {fed.policy.weights}"]
    has = lambda trait: any(trait in p.traits for p in fed.method.parts)
    names = {p.name for p in fed.method.parts}
    if fed.personal:
        out.append(f"clients are served by their own models, scored {fed.personal_scoring}")
    if fed.no_global_model:
        out.append(f"the global model is not scored: {fed.no_global_model}")
    local = [k for k in (*fed.model["params"], *fed.model["buffers"]) if k not in fed.spec.shared]
    correcting = names & {"scaffold", "dyn", "cm", "avgm", "nova", "prox"}
    if correcting and (local or fed.clients.fresh.tensors["personal"]):
        out.append(f"{', '.join(sorted(correcting))}: over parameters that travel and train only; personal tensors are left alone")
    if has("soft labels"):
        if "anchors" in names:
            out.append("anchors: the matching term is weighted by the soft labels")
        if "drift" in names:
            out.append("drift: the margin is taken by label weight")
    mixing = ", ".join(sorted(names & {"manifold_mixup", "mixstyle", "moex"}))
    if mixing and "ffa" in names:
        out.append(f"ffa: its statistics are those of features that {mixing} mixed before")
    if mixing and names & {"drift", "moon"}:
        out.append(f"{', '.join(sorted(names & {'drift', 'moon'}))}: in other models the batch passes without {mixing}")
    if "sam" in names:
        out.append("sam: task and added terms are inside both passes; corrections, statistics and adversaries act once, in the first")
        if "debias" in names or "dann" in names:
            out.append("the adversary's step is taken once, outside sam's second pass")
    comparing = ", ".join(sorted(names & {"constraint", "debias", "drift", "ntd"}))
    if "apple" in names and comparing:
        out.append(f"{comparing}: the received model is the client's core, while its mixture of all cores is in training")
    if "maml" in names:
        out.append("maml: task and added terms are in every pass; corrections act once, statistics and adversaries in the first piece")
    if "debias" in names:
        out.append("debias: a smaller last batch is paired with the first pseudo samples")
    if "local" in names and any(p.reduce for p in fed.method.parts):
        out.append("local: the model does not travel; what other parts exchange still does")
    exclusive = {h: [p.name for p in fed.method.using(h)] for h in EXCLUSIVE if fed.method.using(h)}
    out += [f"`{hook}` belongs to {parts[0]}" for hook, parts in exclusive.items()]
    out.append("order of every fold: " + " → ".join(p.name for p in fed.method.parts) if fed.method.parts else "no part: plain FedAvg")
    return out


def list_methods() -> list[dict[str, Any]]:
    """Every name usable in a stack, presets and parts."""
    parts = installed_parts()
    rows = []
    for preset in PRESETS.values():
        members = [parts[p] for p in preset.parts]
        options = {o: [*targets] for o, targets in preset.options.items()}
        if len(members) == 1:
            options |= {row["name"]: [*forwarded(preset, row["name"])] for row in describe(members[0])}
        rows.append({"name": preset.name, "kind": "method", "idea": preset.idea, "parts": list(preset.parts),
                     "paper": "; ".join(dict.fromkeys(m.paper for m in members)) or "FedAvg (McMahan et al., AISTATS 2017)",
                     "options": _preset_options(options, parts),
                     "helps": _helps(members),
                     "uploads": _uploads(members)})
    for name, cls in parts.items():
        if name in PRESETS:
            continue
        rows.append({"name": name, "kind": "part", "idea": idea_of(cls), "parts": [name], "paper": cls.paper,
                     "options": describe(cls), "helps": list(cls.helps), "uploads": _uploads([cls])})
    return sorted(rows, key=lambda r: (r["kind"], r["name"]))


def _preset_options(options: dict[str, list[str]], parts: dict[str, type[Part]]) -> list[dict[str, Any]]:
    out = []
    for option, targets in options.items():
        part, key = targets[0].split(".")
        row = next(r for r in describe(parts[part]) if r["name"] == key)
        out.append({**row, "name": option, "sets": targets})
    return out


def _helps(members: list[type[Part]]) -> list[str]:
    """Skews that any of the parts is made against; that of a reference ("none: …") where there is none."""
    said = sorted({h for m in members for h in m.helps})
    return [h for h in said if not h.startswith("none")] or said or ["none: the base"]


def _uploads(members: list[type[Part]]) -> list[str]:
    model = [] if any("no global model" in m().traits for m in members) else ["model"]
    return model + [f"{m.name}.{key}" for m in members for key in m.reduce]
