"""Real processes on loopback: a SuperLink with TLS and node authentication, and a SuperNode per site. Run by `make test-federation`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Sites and server of several tests share few cores, and sums are to be added in one order."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before


@pytest.fixture(scope="session")
def federation(tmp_path_factory) -> Iterator:
    """Three sites with skewed digits, whose operators let runs change what a study changes."""
    from consilience.federation.approval import STUDY
    from consilience.federation.demo import digits_federation
    folder = tmp_path_factory.mktemp("federation")
    values = {"method": "fedavg", "rounds": 2, "wait": 2.0, "retries": 0, "retry_pause": 0.5, "min_sites": 2, "allow_raw_averages": True}
    with digits_federation(folder, values, may_change=STUDY) as running:
        yield running


@pytest.fixture
def leftovers(tmp_path):
    """Processes whose command line names this test's folder."""
    def look() -> list[str]:
        out = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(tmp_path) in line and int(entry.parent.name) != os.getpid():
                out.append(line)
        return out
    return look
