"""The pages under docs/results are what their records make of them."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from typer.testing import CliRunner

from consilience.cli import app

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(p.name for p in RESULTS.glob("*.md") if p.name != "README.md")


def test_every_page_is_the_one_that_its_command_makes(tmp_path, monkeypatch):
    """Records grow, and a page that was made before shows another number than the page beside it."""
    kept = tmp_path / "results"
    shutil.copytree(RESULTS, kept)
    monkeypatch.setenv("CONSILIENCE_DATA", str(tmp_path))
    for name in PAGES:
        command = re.search(r"`consilience (reproduce [^`]*)` runs it", (kept / name).read_text(encoding="utf-8"))
        assert command is not None, name
        made = CliRunner().invoke(app, [*shlex.split(command[1]), "--report-only", "--runs", str(kept / "records"),
                                        "--results", str(kept), "--out", str(tmp_path / "out" / name)])
        assert made.exit_code == 0, f"{name}: {made.output}"
    said = lambda page: re.sub(r"by consilience \S+ ", "", page.read_text(encoding="utf-8"))          # whichever version made it
    assert [page.name for page in kept.glob("*.md") if said(page) != said(RESULTS / page.name)] == []
