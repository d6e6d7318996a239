"""`consilience export`, `consilience predict` and `consilience onboard`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..runs.export import export as export_model
from ..runs.files import write_bytes
from ..runs.onboard import onboard as onboard_client
from ..runs.use import predict as predict_samples
from ..runs.use import predictions_csv
from . import settings as s
from .output import AsJson, out, print_json, printed_first

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a finished run.", show_default=False)]
Client = Annotated[str | None, typer.Option("--client", help="The model that serves this client; without it the global one.")]
Which = Annotated[str, typer.Option("--which", help="final, or best: the model of the best validation score.")]
Samples = Annotated[str, typer.Option("--data", help="A source of samples, as in 'folder(path=\"photos\")' or 'arrays(path=\"x.npz\")'.",
                                      show_default=False)]


def export(folder: Folder, to: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("model.safetensors"),
           client: Client = None, which: Which = "final",
           onnx: Annotated[Path | None, typer.Option("--onnx", help="Also write the model as ONNX, to this file.")] = None,
           data_dir: s.DataDir = None, as_json: AsJson = False) -> None:
    """Write a trained model as a state dict in safetensors. A JSON file beside it says how to load it."""
    card = export_model(folder, to, client=client, which=which, onnx=onnx, data_dir=_text(data_dir))
    if as_json:
        return print_json(card)
    console = out()
    console.print(_wrote(to, card) + (f", {onnx}" if onnx else ""), markup=False)
    if not card["state"]["strict"]:
        console.print(f"The method replaced {', '.join(card['state']['replaced_by_the_method'])}: the factory alone does not fit.")
    console.print("Load it with:\n\n" + "\n".join("    " + line for line in card["load"]), markup=False)


def predict(folder: Folder, data: Samples, client: Client = None, which: Which = "final",
            to: Annotated[Path | None, typer.Option("--out", "-o", help="A .csv or .json file; without it CSV on standard output.")] = None,
            data_dir: s.DataDir = None, as_json: AsJson = False) -> None:
    """Predict the class of every sample of a source. Each class has its probability."""
    if to is not None and to.suffix not in (".csv", ".json"):
        raise ConfigError(f"Predictions are written to a .csv or .json file. Got {str(to)!r} instead.")
    document = predict_samples(folder, data, client=client, which=which, data_dir=_text(data_dir))
    with printed_first() as write:
        written = to is not None and write(lambda: _save(document, to))
        if as_json:
            print_json(document)
        elif not written:                           # what the disk refuses is not lost
            typer.echo(predictions_csv(document), nl=False)
        else:
            known = "" if document["accuracy"] is None else f"; {document['accuracy']:.3f} of those with a known label are right"
            out().print(f"{document['samples']} predictions in {to}{known}", markup=False)


def _save(document: dict[str, Any], to: Path) -> None:
    text = predictions_csv(document) if to.suffix == ".csv" else json.dumps(document, indent=1) + "\n"
    write_bytes(to, text.encode())


def onboard(folder: Folder, data: Samples,
            epochs: Annotated[int, typer.Option("--epochs", help="Epochs of local training.")] = 10,
            lr: Annotated[float | None, typer.Option("--lr", help="Learning rate; the run's last by default.")] = None,
            train: Annotated[float, typer.Option("--train", help="Share of the samples to train on; the rest is scored.")] = 0.75,
            which: Which = "final", to: Annotated[Path, typer.Option("--out", "-o", help="The personal model's file.")] =
            Path("personal.safetensors"), data_dir: s.DataDir = None, as_json: AsJson = False) -> None:
    """Give a new client its personal model. The method's own rule makes it; the run's folder is not changed."""
    done = onboard_client(folder, data, epochs=epochs, lr=lr, train=train, which=which, data_dir=_text(data_dir))
    cards: list[dict[str, Any]] = []
    with printed_first() as write:
        write(lambda: cards.append(done.write(to)))
        _show_onboarded(done.report, to, cards[0] if cards else None, epochs, as_json)


def _show_onboarded(r: dict[str, Any], to: Path, card: dict[str, Any] | None, epochs: int, as_json: bool) -> None:
    """`card` is None where the model could not be written."""
    if as_json:
        return print_json({**r, "model": {"file": to.name, **{k: card[k] for k in ("state", "personal", "shared")}} if card else None})
    console = out()
    console.print(f"{r['method']}: a new client with {r['samples']['train']} samples to train on, {r['samples']['held_out']} held out",
                  markup=False)
    trained = f"Trained {epochs} epoch{'s' if epochs != 1 else ''}"
    console.print(f"Starts from: {r['start']}.\n{trained} at {r['lr']:g}: {r['rule']}.", markup=False)
    for key, name in (("accuracy", "accuracy"), ("criterion", r["criterion"])):
        for moment in ("before", "after"):
            if key == "accuracy" or key in (r[moment] or {}):
                console.print(f"{name} {moment:6}  {_three(r[moment], key)}", markup=False)
    if card:
        console.print(_wrote(to, card), markup=False)


def _wrote(to: Path, card: dict[str, Any]) -> str:
    return f"wrote {to} and {to.with_suffix('.json').name}" + "".join(f", {card[k]['file']}" for k in ("personal", "shared") if card[k])


def _three(scores: dict[str, Any] | None, key: str) -> str:
    return "–" if scores is None or scores[key] is None else f"{scores[key]:.3f}"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
