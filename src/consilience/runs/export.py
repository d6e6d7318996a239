"""A trained model as plain files: a state dict in safetensors, a JSON card that says what it is, and ONNX on wish."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import rng
from ..core.federation import Federation
from ..core.network import KeyedDropout, Network
from ..core.part import Model
from ..core.population import Population, RowTable
from ..core.task import task_named
from ..data import transforms
from ..data.dataset import Dataset
from ..engines import Sequential
from ..errors import ConfigError, DataError
from ..models import default_for, make
from .config import RunConfig
from .files import read_json, read_tensors, write_bytes, write_json, write_tensors
from .reload import OpenedRun
from .run import build_model
from .states import filled
from .use import Served, ServedModule, column_names, fed_name, open_finished, personal_tensors, served, shared_tensors

FORMAT = "consilience model 1"


def export(path: str | Path, to: str | Path, *, client: str | None = None, which: str = "final", onnx: str | Path | None = None,
           data_dir: str | None = None) -> dict[str, Any]:
    """Write a finished run's model; returns its card."""
    to = _model_path(to)
    run = open_finished(path, which, data_dir)
    return write_model(run, served(run, client), to, which=which, onnx=onnx)


def _model_path(to: str | Path) -> Path:
    to = Path(to)
    if to.suffix != ".safetensors":
        raise ConfigError(f"The file of a model ends in .safetensors. Got {str(to)!r} instead.")
    return to


def write_model(run: OpenedRun, model: Served, to: Path, *, which: str, onnx: str | Path | None = None) -> dict[str, Any]:
    """`to` holds the state dict, beside it the card (.json) and, where there are any, the personal tensors and those of the method."""
    to = _model_path(to)
    base = build_model(run.config, run.data).module
    state, replaced, left_out = _plain_state(base, model)
    beside = {"personal": personal_tensors(model), "shared": shared_tensors(model.federation)}
    text, sample, vocabulary = _model_text(run)
    card: dict[str, Any] = {
        "format": FORMAT, "method": fed_name(run), "client": model.client, "which": which, "round": run.federation.round_number,
        "model": {"factory": text, "sample": list(sample), "classes": run.data.classes, "vocabulary": vocabulary,
                  "taps": run.config.run.taps, "layout": dataclasses.asdict(run.federation.spec.layout)},
        "input": {"shape": list(run.data.x.shape[1:]), "type": str(run.data.x.dtype).removeprefix("torch."),
                  **({"columns": list(columns)} if (columns := column_names(run)) else {})},
        "task": run.data.task, "class_names": run.about.get("class_names") or [], "transform": run.about.get("transform"),
        "state": {"file": to.name, "strict": not replaced, "replaced_by_the_method": replaced, "left_out": left_out},
        **{kind: {"file": to.with_suffix(f".{kind}.safetensors").name, "tensors": {k: list(t.shape) for k, t in tensors.items()}}
           if tensors else None for kind, tensors in beside.items()},
        "clients": run.federation.size, "config": run.config.settled(run.federation.policy)}
    card["load"] = _how_to_load(card, to)
    card = json.loads(json.dumps(card))              # as it will be read
    write_tensors(to, state)
    for kind, tensors in beside.items():
        if tensors:
            write_tensors(to.with_name(card[kind]["file"]), tensors)
    write_json(to.with_suffix(".json"), card)
    if onnx is not None:
        write_onnx(ServedModule(model), torch.zeros(2, *sample, dtype=torch.int64 if vocabulary else torch.float32), Path(onnx))
    return card


def _model_text(run: OpenedRun) -> tuple[str, tuple[int, ...], int | None]:
    vocabulary = (run.data.description.get("vocabulary") or {}).get("size")
    sample = run.federation.spec.sample
    return run.config.run.model or default_for(run.data.name, sample, vocabulary=vocabulary, task=run.data.task), sample, vocabulary


def _plain_state(base: nn.Module, model: Served) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """The state dict, the modules that the method put something else for, and what it attached that the model needs not."""
    flat = {**model.model["params"], **model.model["buffers"]}
    own = base.state_dict()
    trained = dict(model.federation.program.network.module.named_modules())
    replaced = [name for name, module in base.named_modules() if name and (
        name not in trained or not isinstance(trained[name], (type(module), KeyedDropout)))]
    inside = tuple(name + "." for name in replaced)
    replaced += [k for k, t in own.items() if (k not in flat or flat[k].shape != t.shape) and not k.startswith(inside)]
    if replaced:
        return flat, replaced, []
    return {k: flat[k] for k in own}, [], sorted(flat.keys() - own.keys())


def _how_to_load(card: dict[str, Any], to: Path) -> list[str]:
    if not card["state"]["strict"] or card["personal"] or card["shared"]:
        return ["from consilience.runs.export import load_exported",
                f"model = load_exported({to.name!r})      # with what the method changed or keeps for the client",
                "logits = model(model.prepare(x))      # x: raw samples"]
    m = card["model"]
    more = "".join(f", {k}={m[k]!r}" for k in ("vocabulary", "taps") if m[k] is not None)
    raw = [] if card["transform"] in (None, "none") else \
        [f"# it takes transformed samples; consilience.runs.export.load_exported({to.name!r}).prepare(x) transforms raw ones"]
    return ["from safetensors.torch import load_file", "from consilience import rng", "from consilience.models import make",
            f"module = make({m['factory']!r}, sample={tuple(m['sample'])!r}, classes={m['classes']}, key=rng.key(0){more}).module.eval()",
            f"module.load_state_dict(load_file({to.name!r}), strict=True)", *raw]


def load_exported(path: str | Path) -> ServedModule:
    """An exported model with everything that belongs to it. `prepare` transforms raw samples; calling it gives logits."""
    path = Path(path)
    card = read_json(path.with_suffix(".json"))
    if card.get("format") != FORMAT:
        raise DataError(f"The file {str(path.with_suffix('.json'))!r} does not describe a model of ours ({FORMAT!r}).")
    fed, transform = _shell(card)
    flat = read_tensors(path)
    missing = [k for half in fed.model.values() for k in half if k not in flat and k not in card["state"]["left_out"]]
    if missing:
        raise DataError(f"The file {str(path)!r} lacks {missing[0]!r}, which the model has.")
    model: Model = {half: {k: flat.get(k, old) for k, old in own.items()} for half, own in fed.model.items()}
    state = fed.client(0)
    if card.get("shared"):
        fed.shared = {**fed.shared, **filled({p.name: fed.shared[p.name] for p in fed.method.parts if p.in_every_pass},
                                             read_tensors(path.with_name(card["shared"]["file"])))}
    if card["personal"]:
        personal = read_tensors(path.with_name(card["personal"]["file"]))
        state = replace(state, tensors={**state.tensors, "personal": filled(state.tensors["personal"], personal)})
    return ServedModule(Served(fed, 0, state, model, bool(card["personal"]), card["client"]), transform)


def _shell(card: dict[str, Any]) -> tuple[Federation, Any]:
    """A federation without data, to hold the model: the method's surgery and taps, over samples of zeros."""
    config = RunConfig.make(card["config"])
    m, rows = card["model"], torch.arange(4 * max(config.policy.batch, 2))      # room for what parts hold back
    x = torch.zeros(len(rows), *card["input"]["shape"], dtype=getattr(torch, card["input"]["type"]))
    y = torch.zeros(len(rows), *(x.shape[2:] if card["task"] == "segmentation" else ()), dtype=torch.int64)
    transform = transforms.make(card["transform"], Dataset("exported", x, y, m["classes"]))
    starts = torch.full((card["clients"] + 1,), len(rows))
    starts[0] = 0                                     # the first client has them all
    population = Population(x, y, RowTable(rows, starts), m["classes"], transform, proxy=x if config.run.proxy else None,
                            task=task_named(card["task"]))
    built = make(m["factory"], sample=tuple(m["sample"]), classes=m["classes"], key=rng.key(config.policy.seed, "model"),
                 vocabulary=m["vocabulary"], taps=m["taps"])
    return Federation(built.module, built.layout, config.stack().method(), population, config.policy, Sequential), transform


def write_onnx(module: ServedModule, x: Tensor, to: Path) -> None:
    """The model as an ONNX graph over transformed inputs; the number of samples is free."""
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise ConfigError(f"Writing ONNX needs the package {error.name!r}. Install it with: pip install 'consilience[onnx]'") from None
    device = module.served.federation.device
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")              # of numbers that are constants on purpose, and of the exporter's age
        draft = Path(place) / "model.onnx"
        getattr(torch._C, "_jit_set_onnx_log_output_stream", str)("stderr")      # a graph that fails is printed there, not among our output
        try:                                         # exporter and checker fail with errors of many kinds
            with _in_float32(module.served.federation.program.network):
                torch.onnx.export(module.eval(), (x.to(device),), draft, input_names=["input"], output_names=["logits"], dynamo=False,
                                  dynamic_axes={"input": {0: "samples"}, "logits": {0: "samples"}})
            onnx.checker.check_model(str(draft))
        except Exception as error:
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ConfigError(f"This model cannot be written as ONNX: {said}") from error
        write_bytes(to, draft.read_bytes())


@contextmanager
def _in_float32(network: Network) -> Iterator[None]:
    """The weights are float32 whatever a run computes in, and ONNX has no operator for the way they are cast all at once."""
    kept = network.half, network._weights
    network.half, network._weights = False, None
    try:
        yield
    finally:
        network.half, network._weights = kept
