"""No communication: every client is on its own."""

from __future__ import annotations

import torch
from phase_loop import close, train_by_phases

from consilience.parts.local import Local
from consilience.testing import run_tiny, tiny_federation

EVERYTHING = ["stage1", "neck", "header", "head"]


def test_every_client_trains_a_model_of_its_own():
    fed = run_tiny([Local()], rounds=1)
    for i in (0, 3):
        start = fed.received(fed.client(i))
        assert not torch.equal(start["params"]["head.weight"], fed.model["params"]["head.weight"])
        net = train_by_phases(fed, i, start, [("main", EVERYTHING, 2)])
        fed_again = run_tiny([Local()], rounds=1)
        fed_again.round([i])
        close(fed_again.client(i).tensors["local"], net)


def test_nothing_travels():
    fed = tiny_federation([Local()])
    start = fed.model
    report = fed.round()
    assert (report.bytes_up, report.bytes_down) == (0, 0)
    assert all(torch.equal(fed.model["params"][k], p) for k, p in start["params"].items())
    assert "no global model" in fed.no_global_model


def test_who_else_trains_changes_nothing():
    alone, together = tiny_federation([Local()]), tiny_federation([Local()])
    for _ in range(2):
        alone.round([0])
        together.round([0, 1, 3])
    a, b = (f.client(0).tensors["local"] for f in (alone, together))
    assert all(torch.equal(a[k], b[k]) for k in a)
