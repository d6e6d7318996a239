"""`consilience resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..errors import ConsilienceError
from ..runs.progress import RunProgress, progress_bar
from ..runs.reload import read_run_config
from ..runs.run import run_config
from . import settings as s
from .output import AsJson, err, print_json
from .train import Again, _show


def resume(folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of runs.", show_default=False)],
           data_dir: s.DataDir = None, devices: s.Devices = None, ray: s.Ray = None, again: Again = False, as_json: AsJson = False) -> None:
    """Resume interrupted runs, each with its own settings. A finished run is only read, unless --again is given.

    With --json: one document, as `consilience run` prints it; for several folders, an array of them.
    """
    documents: list[dict[str, Any]] = []
    failed = 0
    for folder in folders:
        try:
            config, _ = read_run_config(folder, str(data_dir) if data_dir else None)
            config = config.replace(devices=devices, ray=ray)          # of this machine, so no folder holds them
            with progress_bar() as bar:
                result = run_config(config, out=folder, listener=RunProgress(bar, config.stack().canonical), again=again)
        except ConsilienceError as error:
            if len(folders) == 1:
                raise
            err().print(f"[red]Error:[/red] {escape(str(folder))}: {escape(str(error))}", soft_wrap=True)
            failed = max(failed, error.exit_code)            # the others go on
            continue
        documents.append(result.document())
        if not as_json:
            _show(result, folder)
    if as_json:
        print_json(documents[0] if len(folders) == 1 else documents)
    if failed:
        raise typer.Exit(failed)
