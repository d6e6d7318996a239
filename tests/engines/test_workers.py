"""The workers engine gives the sequential engine's numbers bit for bit, whoever dies on the way, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from consilience import rng
from consilience.core.client import LocalWork
from consilience.core.part import Part
from consilience.core.slot import Slot
from consilience.engines import Sequential, _parcel
from consilience.engines._pool import Pool, WorkerError
from consilience.engines.devices import Devices
from consilience.engines.workers import Workers
from consilience.errors import ConfigError
from consilience.metrics.accuracy import score_global, score_model, score_personal
from consilience.parts import PARTS
from consilience.parts.prox import Prox
from consilience.parts.scaffold import Scaffold
from consilience.testing import FEW, differences, run_tiny, snapshot, tiny_federation, tiny_population, trial

NAMES = sorted(PARTS)


@pytest.fixture(scope="module")
def pool():
    made = Pool(2)
    yield made
    made.close()


def alive(process: subprocess.Popen) -> bool:
    return process.poll() is None


# ---- the same numbers ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_every_part(name, pool):
    part = trial(PARTS[name])
    one, other = (run_tiny([part], rounds=3, sizes=FEW, engine=engine) for engine in (Sequential, Workers.sharing(pool)))
    assert not differences(one, other)
    assert snapshot(one)[1] == snapshot(other)[1]                   # bookkeeping of the server and of every client


SETTINGS = [{"batchnorm": "local", "optimiser_state": "kept", "momentum": 0.9},
            {"dropout": 0.3, "participation": 0.75, "weights": "samples"}, {"layout": "channels_last", "last_batch": "keep"},
            {"precision": "bfloat16"}, {"optimiser": "adam", "momentum": 0.0, "lr": 0.003}]


@pytest.mark.parametrize("policy", SETTINGS, ids=lambda p: ",".join(p))
def test_under_other_policies(policy, pool):
    parts = [Prox(mu=0.1), trial(PARTS["ditto"])]
    one, other = run_tiny(parts, **policy), run_tiny(parts, engine=Workers.sharing(pool), **policy)
    assert not differences(one, other)
    for a, b in zip(one.model["params"].values(), other.model["params"].values()):
        assert a.stride() == b.stride()                             # layouts survive the journey


def test_a_worker_that_comes_later_uses_the_same_kernels():
    """With one input channel channels_last shows in strides alone; they must outlive aggregation, or a late slot differs."""
    pool = Pool(1)
    fed = tiny_federation([Prox()], engine=Workers.sharing(pool), layout="channels_last")
    before = {k: p.stride() for k, p in fed.model["params"].items()}
    fed.round()
    assert {k: p.stride() for k, p in fed.model["params"].items()} == before
    pool.close()
    fed.round()
    pool.close()
    assert not differences(fed, run_tiny([Prox()], layout="channels_last"))


def test_stack_with_everything(pool):
    parts = [trial(PARTS[n]) for n in ("prox", "scaffold", "anchors", "ffa", "prbm", "mr", "moon")]
    assert not differences(run_tiny(parts), run_tiny(parts, engine=Workers.sharing(pool)))


def test_own_steps_remember(pool):
    parts = [trial(PARTS[n]) for n in ("dann", "debias")]
    one, other = (run_tiny(parts, optimiser_state="kept", **more) for more in ({}, {"engine": Workers.sharing(pool)}))
    assert one.client(0).tensors["optimiser"]["apart"]["dann"]["m"]["dann.0.weight"].abs().max() > 0
    assert not differences(one, other)


def test_two_federations_take_turns(pool):
    a, b = (tiny_federation([p], engine=Workers.sharing(pool)) for p in (Scaffold(), Prox()))
    for _ in range(2):
        a.round()
        b.round()
    assert not differences(a, run_tiny([Scaffold()]))
    assert not differences(b, run_tiny([Prox()]))


def test_data_mapped_from_a_file_are_not_copied(pool, tmp_path):
    plain = tiny_population()
    path = tmp_path / "x.bin"
    plain.x.numpy().tofile(path)
    mapped = torch.from_file(str(path), shared=True, size=plain.x.numel()).view(plain.x.shape)
    population = type(plain)(mapped, plain.y, plain.rows, plain.classes, plain.transform, plain.names, plain.proxy)
    fed = run_tiny([Scaffold()], population=population, engine=Workers.sharing(pool))
    assert not differences(fed, run_tiny([Scaffold()]))
    region, reader = _parcel.Region(tmp_path, "r"), _parcel.Reader(tmp_path)
    again = reader.read(region.write(mapped[5:]), copy=False)
    assert region.path.stat().st_size < plain.x[5:].numel() * 4     # the tensor is not in it
    assert torch.equal(again, plain.x[5:])
    assert reader._files.keys() == {str(path)}
    reader.let_go()
    assert torch.equal(again, plain.x[5:])


def double(fed, number, common, own):
    return {"twice": own * 2, "who": (number, common["word"], fed.client(number).first)}


def test_tasks_for_clients_come_back_in_order(pool):
    fed = tiny_federation(engine=Workers.sharing(pool))
    fed.round([0, 1])
    given = [torch.full((2,), float(i)) for i in (3, 0, 1)]
    out = list(fed.each(double, [3, 0, 1], {"word": "w"}, given))
    assert [o["who"] for o in out] == [(3, "w", True), (0, "w", False), (1, "w", False)]
    assert [o["twice"].tolist() for o in out] == [[6.0, 6.0], [0.0, 0.0], [2.0, 2.0]]


@pytest.mark.parametrize("name", ["prox", "ditto", "babu", "bn"])
def test_scores(name, pool):
    """The global model in pieces, the clients' own one by one: the same numbers from either engine."""
    part = trial(PARTS[name])
    rows, names = [torch.arange(0, 9), torch.arange(20, 20), torch.arange(40, 44), torch.arange(41, 80)], list("abcd")
    one, other = (run_tiny([part], rounds=1, eval_batch=4, engine=e) for e in (Sequential, Workers.sharing(pool)))
    assert score_personal(one, rows, names) == score_personal(other, rows, names)
    assert score_global(one, rows, names) == score_global(other, rows, names)
    assert score_global(one, rows, names).counts == (9, 0, 4, 39)
    model = {**one.model, "params": {k: p * 0.5 for k, p in one.model["params"].items()}}
    assert score_model(other, model, rows, names, "") == score_model(one, model, rows, names, "") != score_global(one, rows, names)


def test_longest_clients_first(pool):
    served = []
    fed = tiny_federation(engine=Workers.sharing(pool))
    hand = _parcel.Region.write

    def note(self, value):
        if ".in" in self.name:
            served.append(value[0])
        return hand(self, value)
    _parcel.Region.write = note
    try:
        fed.round([1, 0, 3])
    finally:
        _parcel.Region.write = hand
    assert served == [3, 0, 1]                                      # 40, 24 and 17 samples


# ---- what goes wrong -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Broken(Part):
    """Fails on one client, in a worker."""

    name = "broken"

    def init_scratch(self, c):
        if c.id == 1:
            raise ConfigError("client 1 has no luck")
        return {}


@dataclass(frozen=True)
class Deadly(Part):
    """Ends every process that trains client 1."""

    name = "deadly"

    def init_scratch(self, c):
        if c.id == 1:
            os._exit(7)
        return {}


class Visit(LocalWork):
    """A client's round that says something else at its end."""

    def finish(self, slot: Slot) -> Any:
        return f"seen {super().finish(slot).losses.numel()}"


@pytest.mark.parametrize("engine", [Workers.of(2), Devices.on(["cpu", "cpu"])])
def test_work_of_another_kind_is_done_here_as_it_is(engine: Any) -> None:
    """A worker is told which client to train, and would train it as in any round."""
    fed = tiny_federation(engine=engine)
    works = [Visit(fed, i, fed.client(i), [0, 1], {}) for i in (0, 1)]
    with torch.enable_grad():
        assert list(fed.engine.run(works)) == [f"seen {w.steps}" for w in works]


def test_an_error_in_a_worker_is_raised_here_and_the_round_undone(pool):
    fed = tiny_federation([Broken()], engine=Workers.sharing(pool))
    with pytest.raises(ConfigError, match="client 1 has no luck") as caught:
        fed.round()
    assert "init_scratch" in caught.value.__notes__[0]              # where it happened
    assert fed.round_number == 0
    fed.round([0, 3])                                               # the engine goes on with new processes
    assert fed.round_number == 1


def test_a_client_that_kills_every_worker_is_given_up(monkeypatch):
    monkeypatch.setattr("consilience.engines._pool.MOST_ATTEMPTS", 2)
    pool = Pool(1)
    fed = tiny_federation([Deadly()], engine=Workers.sharing(pool))
    with pytest.raises(WorkerError, match="ended 2 worker processes"):
        fed.round()
    assert not pool.processes


def test_what_cannot_be_sent_is_said(pool):
    class Local(Part):                                              # nobody else can import it
        name = "here"
    with pytest.raises((AttributeError, ConfigError), match="Local"):
        run_tiny([Local()], engine=Workers.sharing(pool))


def test_too_little_shared_memory(monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    pool = Pool(1)
    with pytest.raises(ConfigError, match="shared memory"):
        run_tiny(engine=Workers.sharing(pool))
    pool.close()


class Killer(threading.Thread):
    """Kills workers that have work, at random moments."""

    def __init__(self, pool: Pool, kills: int) -> None:
        super().__init__(daemon=True)
        self.pool, self.left, self.luck = pool, kills, rng.host(rng.key(3, "killer"))

    def run(self) -> None:
        while self.left:
            time.sleep(float(self.luck.uniform(0.0, 0.4)))        # within a round or two of these clients
            busy = [p for p in list(self.pool.processes) if p.ready and p.tickets]
            if busy:
                busy[int(self.luck.integers(len(busy)))].process.kill()
                self.left -= 1


def run_among_kills(kills: int) -> None:
    parts = [Scaffold(), trial(PARTS["anchors"]), trial(PARTS["ditto"])]
    pool = Pool(2)
    fed = tiny_federation(parts, engine=Workers.sharing(pool), sizes=(60, 45, 80, 52, 70, 66))
    killer = Killer(pool, kills)
    killer.start()
    try:
        while killer.is_alive():
            fed.round()
        fed.round()
        assert 0 < pool.restarts <= kills                           # two kills may hit one process
        assert len(pool.processes) == 2
    finally:
        pool.close()
    assert not differences(fed, run_tiny(parts, rounds=fed.round_number, sizes=(60, 45, 80, 52, 70, 66)))


def test_workers_killed_at_random():
    run_among_kills(5)


@pytest.mark.slow
def test_workers_killed_at_random_fifty_times(monkeypatch):
    monkeypatch.setattr("consilience.engines._pool.MOST_ATTEMPTS", 51)      # on a busy machine ten of them may hit one client's work
    run_among_kills(50)


# ---- nothing stays ---------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from consilience.engines.workers import Workers
from consilience.core.part import Part
from consilience.testing import tiny_federation

class Mine(Part):
    name = "mine"

if __name__ == "__main__":
    fed = tiny_federation([Mine()], engine=Workers.of(2), sizes=(4000, 4000, 4000, 4000), epochs=50)
    def tell(done, of): pass
    import threading
    def say():
        pool = fed.engine.pool
        while len([p for p in pool.processes if p.ready and p.tickets]) < 2:
            time.sleep(0.05)
        print(pool.folder, *(p.process.pid for p in pool.processes), flush=True)
    threading.Thread(target=say, daemon=True).start()
    try:
        fed.round()
    except KeyboardInterrupt:
        print("interrupted", fed.round_number, flush=True)
"""


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks processes up in /proc")
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_no_process_and_no_memory_is_left(blow, tmp_path):
    script = tmp_path / "training.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    folder, *pids = process.stdout.readline().split()
    assert Path(folder).is_dir()
    assert all(exists(int(p)) for p in pids)
    process.send_signal(blow)
    said, _ = process.communicate(timeout=20)
    if blow == signal.SIGINT:
        assert said.strip() == "interrupted 0"
        assert process.returncode == 0
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (Path(folder).exists() or any(exists(int(p)) for p in pids)):
        time.sleep(0.05)
    assert not Path(folder).exists()
    assert not any(exists(int(p)) for p in pids)


def test_leaving_in_the_middle_ends_the_work(pool):
    fed = tiny_federation(engine=Workers.sharing(pool))
    first = fed.each(double, [0, 1, 3], {"word": ""}, [torch.ones(1)] * 3)
    next(first)
    before = [p.process for p in pool.processes]
    del first
    assert not any(alive(p) for p in before)
    fed.round()                                                     # starts again
