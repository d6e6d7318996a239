"""Open a run's folder again: its settings, its data, its records and the federation as it stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.federation import Federation
from ..data import SOURCES, FederatedData
from ..errors import ConfigError, DataError
from .config import RunConfig
from .environment import version_of
from .files import read_json
from .folder import RunFolder, read_records
from .outside import refuse_other_code
from .run import build_federation, load_data
from .states import opened_store


@dataclass(frozen=True)
class OpenedRun:
    """A run read back. The federation stands at the newest sound checkpoint."""

    path: Path
    config: RunConfig
    about: dict[str, Any]                  # what the run knew of its data
    records: list[dict[str, Any]]
    data: FederatedData
    federation: Federation

    @property
    def done(self) -> bool:
        return (self.path / "done").is_file()


def no_run(path: Path) -> ConfigError:
    """The error for a folder without a run's settings."""
    below = sorted(p.parent for p in path.glob("*/config.json"))
    runs = f" It is a folder of runs, as of a comparison; name one of them, as {str(below[0])!r}." if below else ""
    return ConfigError(f"The folder {str(path)!r} holds no run: it has no config.json.{runs}")


def read_run_config(path: str | Path, data_dir: str | None = None) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration a run's folder holds, and what it says of its data."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise no_run(path)
    stored = read_json(path / "config.json")
    held = [stored.get(part) for part in ("config", "data")] + [stored.get("places", {})] if isinstance(stored, dict) else [None]
    if not all(isinstance(part, dict) for part in held):
        raise ConfigError(f"The folder {str(path)!r} holds no run: its config.json is another program's.")
    values = {**stored["config"], **{k: v for k, v in stored.get("places", {}).items() if v is not None}}
    if data_dir is not None:
        values["data_dir"] = data_dir
    try:
        return RunConfig.make(values), stored["data"]
    except ConfigError as error:
        raise ConfigError(f"The settings of the run in {str(path)!r} cannot be read here. {error}{_of_another_version(path)}") from error


def _of_another_version(path: Path) -> str:
    """What to do where settings are not known because a newer version wrote them."""
    made = read_json(path / "environment.json") if (path / "environment.json").is_file() else {}
    theirs, ours = made.get("packages", {}).get("consilience"), version_of("consilience")
    return f" It was made with consilience {theirs}, and this is {ours}: use that version." if theirs and ours and theirs != ours else ""


def open_run(path: str | Path, data_dir: str | None = None, data: FederatedData | None = None) -> OpenedRun:
    """Read a run back, finished or not. The data must be what the run was trained on, split the same; those that a run was given in
    memory are given again."""
    path = Path(path)
    config, about = read_run_config(path, data_dir)
    refuse_other_code(path, read_json(path / "config.json").get("code", {}), config, "Bring that version back to use the run.")
    name = config.run.data
    if data is None and (path / "federation.json").is_file():
        raise ConfigError(f"The folder {str(path)!r} holds a federation over sites, whose rows stay with them, so it cannot be opened as a "
                          "run. Its global model is final/global.safetensors; docs/federation.md says how to use it.")
    if data is None and "(" not in name and (name not in SOURCES or SOURCES[name].needs_path):
        raise DataError(f"The run in {str(path)!r} was trained on data in memory ({name!r}), which its folder does not hold. From "
                        "Python consilience.runs.reload.open_run(path, data=…) takes them; runs on files, as "
                        'arrays(path="mine.npz"), find them again.')
    data = data or load_data(config)
    if (mine := data.split_hash()) != (theirs := about.get("hash")):
        raise DataError(f"The data of the run in {str(path)!r} are divided differently now: hash {mine} in place of {theirs}. "
                        "Was the data set changed? A run that was given data which `load` had divided needs them again: open_run(path, "
                        "data=…).")
    fed = build_federation(config, data)
    opened_store(fed, path)
    if RunFolder(path).restore_newest(fed) < 0:
        raise DataError(f"The folder {str(path)!r} holds no checkpoint that can be read.")
    records = read_records(path / "records.jsonl") if (path / "records.jsonl").is_file() else []
    return OpenedRun(path, config, about, records, data, fed)
