"""`consilience federation init`: a small Flower app over the installed package, that a person can read, change and start.

    pyproject.toml   what Flower needs to know, and every setting of the federation with its meaning
    app.py           imports the installed package; sites run nothing else of ours
    README.md        for the operator of the server
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.policy import Policy
from ..data import SOURCES
from ..data.sources import make as make_source
from ..data.transforms import make as make_transform
from ..engines.flower.build import rehearse
from ..engines.flower.settings import FederationSettings, _Agreed
from ..errors import ConfigError, DataError
from ..models import default_for
from ..options import coerce, parse_call
from ..runs.config import _RunOnly, flatten_settings
from ..runs.files import disk
from ..runs.scoring import cautions_of
from .approval import hash_of
from .commands import command_path, toml_value
from .processes import Processes
from .site import ADAPTERS, load_site, read_adapter

APP = '''"""A federation of Consilience on Flower: method and settings stand in pyproject.toml, the code is the installed package."""

from consilience.engines.flower import client_app, server_app

server = server_app()
client = client_app()
'''
GROUPS = {
    "What is trained": ("method", "model", "taps", "pretrained", "rounds", "eval_every", "criterion", "seed"),
    "The data all sites have in common": ("sites", "sample", "input", "classes", "class_names", "feature_names", "task", "vocabulary",
                                          "transform", "proxy"),
    "Rounds, and what happens when sites are late or missing": ("min_sites", "deadline", "late", "wait", "retries", "retry_pause",
                                                                "participation", "max_upload_mb"),
    "Training at a site": ("lr", "batch", "epochs", "steps", "optimiser", "momentum", "weight_decay", "schedule", "last_batch", "sampling",
                           "weights", "batchnorm", "optimiser_state", "precision"),
    "What may leave a site": ("allow_raw_averages",),
    "The server": ("folder", "label"),
}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")


def init(folder: str | Path, values: Mapping[str, Any], *, like: str | None = None, name_of_data: str = "",
         warn: Callable[[str], None] = lambda text: None) -> FederationSettings:
    """Check the settings as a run would, then write the app. Nothing is written when something is refused.

    `name_of_data` is the name of the data set of a simulation whose default model the federation shall have; `warn` is told what a
    run would warn of before its first round.
    """
    folder = Path(folder)
    name = folder.absolute().name
    if not _NAME.fullmatch(name):
        raise ConfigError(f"Flower takes the folder's name as the app's: letters, digits and hyphens, a letter first, at most 32. "
                          f"Got {name!r} instead.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} exists and is not empty. Name a new folder.")
    settings = settle(values, like=like, name_of_data=name_of_data, warn=warn)
    with disk("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_text(pyproject(name, settings), encoding="utf-8")
        (folder / "app.py").write_text(APP, encoding="utf-8")
        (folder / "README.md").write_text(readme(name, settings), encoding="utf-8")
    return settings


def settle(values: Mapping[str, Any], *, like: str | None = None, name_of_data: str = "",
           warn: Callable[[str], None] = lambda text: None) -> FederationSettings:
    """Settings with what `like` (a data set or a site's adapter) tells of the samples, tried out."""
    given = {**(_form_of(like) if like else {}), **values}
    if values.get("class_names") and "classes" not in values:             # that site may lack some of them
        given["classes"] = len(coerce(values["class_names"], tuple[str, ...], "The 'class_names' option of the federation"))
    if not given.get("sample") and not like:
        raise ConfigError("What do samples look like? Say --like with a site's data, as in --like \"arrays(path='site.npz')\", or "
                          "--sample 1,28,28 --classes 10.")
    settings = FederationSettings.make(given)
    if settings.run.run.model is None:
        a = settings.agreed
        text = default_for(name_of_data or (like or "").partition("(")[0], tuple(_transformed(settings).shape[1:]),
                           vocabulary=a.vocabulary, task=a.task)
        settings = FederationSettings.make({**given, "model": text})
    fed = rehearse(settings)       # builds model and method on samples of zeros: what cannot work is said before any site hears of it
    for message in cautions_of(fed, settings.run.run.rounds):
        warn(message)
    return settings


def _transformed(settings: FederationSettings) -> torch.Tensor:
    x = torch.zeros(1, *settings.agreed.sample, dtype=getattr(torch, settings.agreed.input))
    return settings.make_transform()(x, torch.zeros(1, dtype=torch.int64), None)[0]


def _form_of(like: str) -> dict[str, Any]:
    """Shape, type, classes and transform of a data set or of one site's data."""
    named = ":" not in like.partition("(")[0] and parse_call(like, "--like")[0]
    if named and named not in ADAPTERS:
        if named not in SOURCES:
            raise DataError(f"--like takes a site's data ({', '.join(ADAPTERS)} or package.module:function) or a data set. Got {like!r} "
                            "instead; `consilience data list` shows data sets.")
        source = make_source(like)
        dataset = source.read(None)
        transform = source.default_transform or ("normalise" if dataset.mean else "none")
        return {**_form(dataset.x, dataset.classes, dataset.class_names, dataset.task),
                "transform": make_transform(transform, dataset).text}
    classes, features = _names(like)
    site = load_site(like, class_names=classes)
    return {**_form(site.x, site.classes, classes, site.task), "feature_names": features}


def _names(like: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of one site's classes (where that site lacks some, the operator adds them), and of its columns."""
    dataset = read_adapter(like)[0]
    return (() if all(n.isdecimal() for n in dataset.class_names) else dataset.class_names), dataset.feature_names


def _form(x: torch.Tensor, classes: int, names: tuple[str, ...], task: str) -> dict[str, Any]:
    out = {"sample": tuple(x.shape[1:]), "input": str(x.dtype).removeprefix("torch."), "classes": classes, "task": task,
           "class_names": names}
    if x.dtype == torch.int64 and x.dim() == 2:
        out["vocabulary"] = int(x.max()) + 1
    return out


def pyproject(name: str, settings: FederationSettings) -> str:
    """All settings stand there, because Flower lets a run override only settings that the app has."""
    flat = settings.flat()
    docs = {f.name: f.metadata.get("doc", "") for cls in (_Agreed, Policy, _RunOnly) for f in dataclasses.fields(cls)}
    lines = ["[build-system]", 'requires = ["hatchling"]', 'build-backend = "hatchling.build"', "", "[project]", f'name = "{name}"',
             'version = "1.0.0"', f'description = "A federation that trains {settings.run.stack().canonical}"', 'license = "Apache-2.0"',
             'dependencies = ["consilience[flower]"]', "", "[tool.hatch.build.targets.wheel]", 'packages = ["."]', "",
             "[tool.flwr.app]", 'publisher = "consilience"', "", "[tool.flwr.app.components]",
             'serverapp = "app:server"', 'clientapp = "app:client"', "",
             "# Every setting is the same at all sites. `flwr run . NAME --run-config 'rounds=10'` changes one for one run, where the",
             "# sites have approved that.", "[tool.flwr.app.config]"]
    left = dict(flat)
    for title, names in GROUPS.items():
        lines += ["", f"# {title}"]
        for key in names:
            if key in left:
                lines.append(_line(key, left.pop(key), docs.get(key, "")))
        if title.startswith("What is trained"):
            own = [k for k in left if k.startswith("settings.")]
            lines += [_line(k, left.pop(k), "the method's own option") for k in own]
    if left:
        lines += ["", "# The rest", *(_line(k, v, docs.get(k, "")) for k, v in left.items())]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any, doc: str) -> str:
    return f"{key} = {toml_value(value)}".ljust(34) + (f"  # {doc}" if doc else "")


def readme(name: str, settings: FederationSettings) -> str:
    stack, a = settings.run.stack().canonical, settings.agreed
    return f"""# {name}

A federation of {a.sites} sites that trains `{settings.run.run.method}` ({stack}) on the model `{settings.run.run.model}` for
{settings.run.run.rounds} rounds. `pyproject.toml` holds every setting with its meaning; `app.py` imports the installed package and
nothing else.

On the server:

    consilience federation certificates certificates --host SERVER-NAME
    consilience federation server server --certificates certificates --host 0.0.0.0 --admit site-0.pub --admit site-1.pub …

At each site, with its own number and data:

    consilience federation key store
    consilience federation approve store HASH            # of this app, as `consilience federation hash {name}` prints it
    consilience federation site store --server SERVER-NAME:9092 --ca ca.crt --number 0 --data "arrays(path='site.npz')"

Then, on the server:

    FLWR_TELEMETRY_ENABLED=0 FLWR_HOME=$PWD/server/flower/server flwr run {name} consilience --stream

(`consilience federation server` prints that line; `consilience` is the name it gives the connection.)

That command exits with 0 whatever becomes of the run. The "status" that this prints says how it ended, finished:completed or \
finished:failed:

    FLWR_TELEMETRY_ENABLED=0 FLWR_HOME=$PWD/server/flower/server flwr list consilience --format json

Changing anything in this folder changes the app's hash, and sites refuse it until their operators approve the new one.
"""


def read_settings(app: str | Path) -> FederationSettings:
    """The settings of an app's folder."""
    path = Path(app) / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))
        held = project["tool"]["flwr"]["app"]["config"]
    except FileNotFoundError:
        raise DataError(f"There is no app in {str(app)!r}: {path.name} is missing. Make one with: consilience federation init DIR "
                        "--method …") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"The file {str(path)!r} cannot be read: {error}.") from None
    except (KeyError, TypeError):
        raise DataError(f"The file {str(path)!r} has no [tool.flwr.app.config]: this is no app of a federation.") from None
    nested = {k: v for k, v in held.items() if k != "settings"}
    return FederationSettings.make({**nested, "settings": flatten_settings(held.get("settings", {}))})


def bundle(app: str | Path) -> bytes:
    """An app's bundle, as Flower builds and ships it; or a bundle file as it is."""
    app = Path(app)
    if app.is_file():
        return app.read_bytes()
    if not (app / "pyproject.toml").is_file():
        raise DataError(f"There is no app in {str(app)!r}: pyproject.toml is missing.")
    with tempfile.TemporaryDirectory() as scratch, Processes() as processes:
        where = Path(scratch)
        child = processes.start("flwr build", [command_path("flwr"), "build", "--app", str(app.absolute())], where / "build.log",
                                env={"FLWR_HOME": str(where / "home"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
                                     "NO_COLOR": "1"}, cwd=where)
        child.wait(120)
        made = list(where.glob("*.fab"))
        if not made:
            raise DataError(f"Flower could not bundle {str(app)!r}:\n{child.tail()}")
        return made[0].read_bytes()


def app_hash(app: str | Path) -> str:
    return hash_of(bundle(app))
