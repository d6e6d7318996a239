"""Workers on a Ray cluster give one machine's numbers bit for bit, whoever is lost on the way. Here the cluster is two embedded workers."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("ray", reason="Ray is not installed: pip install 'consilience[ray]'")

import ray

from consilience.core.part import Part
from consilience.engines import Sequential, choose
from consilience.engines._plain import rebuild_error
from consilience.engines._pool import WorkerError
from consilience.engines.ray import Cluster, Crew, Lost, Plan, Ray, each_job
from consilience.engines.ray.actor import Worker, versions
from consilience.engines.ray.packing import pack, unpack
from consilience.errors import ConfigError
from consilience.loading import LOADED, load_file
from consilience.metrics.accuracy import score_global, score_personal
from consilience.parts import PARTS
from consilience.parts.prox import Prox
from consilience.parts.scaffold import Scaffold
from consilience.runs import cluster as run_cluster
from consilience.runs import run
from consilience.runs.compare import compare_config
from consilience.runs.config import RunConfig
from consilience.runs.many import Job, run_many
from consilience.testing import differences, run_tiny, snapshot, tiny_federation, trial

NAMES = sorted(PARTS)


# ---- without a cluster -----------------------------------------------------------------------------------------------

def test_values_arrive_as_they_left():
    last = torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    one = torch.zeros(4, 1, 3, 3).to(memory_format=torch.channels_last)          # one channel: only strides tell
    x = torch.arange(6).view(2, 3)
    value = {"t": last, "one": one, "turned": x.t(), "half": torch.ones(3, dtype=torch.bfloat16), "none": torch.zeros(0, 4), "again": x,
             "number": torch.tensor(7), "yes": torch.tensor([True, False]), "p": nn.Parameter(torch.ones(2)), "word": ("w", 1.5),
             "frozen": nn.Parameter(torch.ones(2), requires_grad=False)}
    value["same"] = value["again"]
    packed = pack(value)
    assert len(packed.arrays) == 10                                              # the same tensor travels once
    for copy in (True, False):
        got = unpack(packed, copy)
        for key, was in value.items():
            if isinstance(was, torch.Tensor):
                assert torch.equal(got[key], was), key
                assert got[key].dtype == was.dtype
        assert got["t"].stride() == last.stride()
        assert got["one"].stride() == one.stride()
        assert isinstance(got["p"], nn.Parameter)
        assert got["p"].requires_grad
        assert isinstance(got["frozen"], nn.Parameter)
        assert not got["frozen"].requires_grad                                   # what the user froze stays frozen
        assert got["word"] == ("w", 1.5)
        assert got["same"] is got["again"]
    shared = unpack(packed, copy=False)["again"]
    assert shared.data_ptr() == packed.arrays[5].ctypes.data                     # in place
    assert unpack(packed, copy=True)["again"].data_ptr() != shared.data_ptr()


def test_a_part_in_a_file_of_the_user_s_travels_with_its_code(tmp_path):
    """Other machines have no such file, and Ray's workers of this one have not run it."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom consilience import Part\n\ndef twice(x):\n    return 2 * x\n\n"
        "@dataclass(frozen=True)\nclass Mine(Part):\n    strength: float = 1.0\n    name = 'mine'\n"
        "    def loss(self, v):\n        return twice(self.strength * v)\n")
    module = load_file(str(tmp_path / "mine.py"), "a part")
    packed = pack({"parts": [module.Mine(strength=3.0)]})
    del sys.modules[module.__name__]
    LOADED.pop(module.__name__)
    part = unpack(packed, copy=False)["parts"][0]
    assert part.loss(2.0) == 12.0
    assert isinstance(part, Part)


def test_how_many_workers(monkeypatch):
    there = Cluster("head:6379", ours=False)
    monkeypatch.setattr(Cluster, "has", lambda self, what: {"CPU": 16, "GPU": 0}[what])
    monkeypatch.setattr(Cluster, "machines", 2)
    assert there.plan(50, None) == Plan(16, "cpu")
    assert there.plan(4, None) == Plan(4, "cpu")
    assert there.plan(50, None, workers=3) == Plan(3, "cpu")
    with pytest.raises(ConfigError, match=r"cluster at head:6379 \(2 machines, 16 cores\) has none"):
        there.plan(50, gpus=True)
    monkeypatch.setattr(Cluster, "has", lambda self, what: {"CPU": 16, "GPU": 3}[what])
    assert there.plan(50, None) == Plan(3, "cuda")
    assert there.plan(50, gpus=False) == Plan(16, "cpu")
    assert "16 cores, 3 GPUs" in there.described()


@pytest.mark.parametrize(("address", "said"), [("127.0.0.1:1", "refused"), ("ray://head:10001", "give host:port"), ("head:99999999", "")])
def test_an_address_where_nobody_answers(address, said):
    with pytest.raises(ConfigError, match=f"No Ray cluster can be used at '{address}'") as caught:
        Cluster.connect(address)
    assert said in str(caught.value)
    assert "leave the address out" in str(caught.value)


@pytest.mark.parametrize("fails", [False, True])
def test_who_handles_sigterm_goes_on_handling_it(monkeypatch, fails):
    """Ray, which ends the process with 1, takes it only where nobody else does."""
    own, rays = lambda number, frame: None, lambda number, frame: sys.exit(1)

    def take(**options):
        signal.signal(signal.SIGTERM, rays)
        if fails:
            raise RuntimeError("no")
    monkeypatch.setattr(ray, "init", take)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    for handler, after in ((own, own), (signal.SIG_IGN, signal.SIG_IGN), (signal.SIG_DFL, rays)):
        signal.signal(signal.SIGTERM, handler)
        try:
            with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
                Cluster.connect()
            seen = signal.getsignal(signal.SIGTERM)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert seen is after


def test_a_machine_with_other_versions_is_refused():
    crew = Crew(Cluster(None, ours=False), Plan(1, "cpu"))
    with pytest.raises(ConfigError, match=r"'node7' has other versions: torch .* here and 1\.0 there"):
        crew._greet(None, versions() | {"torch": "1.0"}, "node7", "")


def test_a_worker_does_what_it_is_told():
    """The actor's class without Ray around it: twin, state, work; and trouble that came before the work is told with it."""
    fed = run_tiny([Scaffold()], rounds=1)
    from consilience.core.client import train_client
    from consilience.engines._twin import plan_of, server_state
    worker = Worker("cpu")
    worker.build(pack(plan_of(fed)))
    fed.round_number += 1                                                        # as within a round
    worker.set_up(pack((server_state(fed), train_client, [0, 1])))
    kind, packed, notes = worker.work(pack([(0, fed.client(0), {}), (1, fed.client(1), {})]))
    assert (kind, notes) == ("done", [])
    outcomes = unpack(packed, copy=True)
    assert [len(o.losses) for o in outcomes] == [6, 4]                           # 24 and 17 samples, batches of 8, two epochs
    fed.round_number -= 1
    both = tiny_federation([Scaffold()])
    both.round()
    both.round([0, 1])
    assert all(torch.equal(both.client(i).tensors["kept"]["scaffold"]["c"][k], t)
               for i, o in enumerate(outcomes) for k, t in o.state.tensors["kept"]["scaffold"]["c"].items())
    worker.build(pack((1, 2)))
    worker.set_up(pack(()))
    kind, error, text = worker.work(pack([]))
    assert kind == "failed"
    assert isinstance(rebuild_error(error), ValueError)
    assert "unpack" in text


def test_without_ray(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("consilience.engines.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'consilience\[ray\]'"):
        importlib.import_module("consilience.engines.ray")


def test_a_folder_that_is_elsewhere_travels_back(tmp_path):
    """On a machine that does not see the folder the run is made in another one, and its files come back."""
    config = RunConfig.make({"rounds": 2, "clients": 3, "train_fraction": 0.2})
    here, there = tmp_path / "here" / "run", tmp_path / "far" / "run"
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / ".ray-1").touch()
    one = run_cluster.attempt_there(config.flat(), str(here), False, None, ".ray-1", lambda n: None)
    heard: list[int] = []
    other = run_cluster.attempt_there(config.flat(), str(there), False, None, ".ray-1", heard.append)
    assert one[2] is None
    assert heard[-1] == 2
    assert not there.exists()
    run_cluster._put(there, other[2])
    name = lambda folder: sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert name(here) == name(there)
    assert (here / "final" / "global.safetensors").read_bytes() == (there / "final" / "global.safetensors").read_bytes()
    assert other[0]["records"] == one[0]["records"]
    assert run("fedavg", rounds=2, clients=3, train_fraction=0.2, out=there).records == run(
        "fedavg", rounds=2, clients=3, train_fraction=0.2, out=there).records     # read as a finished run
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(ConfigError, match="no run of ours"):
        run_cluster._put(tmp_path / "mine", other[2])
    assert (tmp_path / "mine" / "letter.txt").exists()


def test_sharing_out_twice_is_refused():
    job = Job("one", RunConfig.make({"engine": "ray"}), None)
    with pytest.raises(ConfigError, match="engine=ray would share out"):
        run_many([job], "", on="ray")
    with pytest.raises(ConfigError, match="Did you mean 'ray'"):
        run_many([job], "", on="rays")


# ---- two embedded workers --------------------------------------------------------------------------------------------

federation = pytest.mark.federation


@pytest.fixture(scope="module")
def cluster():
    made = Cluster.connect(cores=2)
    yield made
    made.close()
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def crew(cluster):
    made = CREWS[0] = Crew(cluster, Plan(2, "cpu"))
    yield made
    made.close()


CREWS: dict[int, Crew] = {}


@pytest.fixture
def free(cluster):
    """The cluster without the crew of other tests, who would hold both cores."""
    if CREWS:
        CREWS[0].close()
    return cluster


@federation
@pytest.mark.parametrize("name", NAMES)
def test_every_part(name, crew):
    part = trial(PARTS[name])
    one, other = run_tiny([part]), run_tiny([part], engine=Ray.with_crew(crew))
    assert not differences(one, other)
    assert snapshot(one)[1] == snapshot(other)[1]                                # bookkeeping of the server and of every client


@federation
@pytest.mark.parametrize("policy", [{"batchnorm": "local", "optimiser_state": "kept"}, {"layout": "channels_last", "last_batch": "keep"},
                                    {"precision": "bfloat16", "participation": 0.75}], ids=lambda p: ",".join(p))
def test_under_other_policies(policy, crew):
    parts = [Prox(mu=0.1), trial(PARTS["ditto"])]
    assert not differences(run_tiny(parts, **policy), run_tiny(parts, engine=Ray.with_crew(crew), **policy))


@federation
def test_scores(crew):
    rows, names = [torch.arange(0, 9), torch.arange(20, 20), torch.arange(40, 44), torch.arange(41, 80)], list("abcd")
    one, other = (run_tiny([trial(PARTS["ditto"])], rounds=1, eval_batch=4, engine=e) for e in (Sequential, Ray.with_crew(crew)))
    assert score_personal(one, rows, names) == score_personal(other, rows, names)
    assert score_global(one, rows, names) == score_global(other, rows, names)


@dataclass(frozen=True)
class Broken(Part):
    """Fails on one client."""

    name = "broken"

    def init_scratch(self, c):
        if c.id == 1:
            raise ConfigError("client 1 has no luck")
        return {}


@dataclass(frozen=True)
class Deadly(Part):
    """Ends the process that trains client 1, as often as there are files to take away."""

    name = "deadly"
    folder: str = ""

    def init_scratch(self, c):
        if c.id == 1:
            for path in sorted(Path(self.folder).iterdir())[:1]:
                path.unlink()
                os._exit(7)
        return {}


@federation
def test_an_error_in_a_worker_is_raised_here_and_the_round_undone(crew):
    fed = tiny_federation([Broken()], engine=Ray.with_crew(crew))
    with pytest.raises(ConfigError, match="client 1 has no luck") as caught:
        fed.round()
    assert "init_scratch" in caught.value.__notes__[0]
    assert fed.round_number == 0
    fed.round([0, 3])                                                            # with new workers
    assert fed.round_number == 1


@federation
def test_a_lost_worker_costs_time_alone(free, tmp_path, monkeypatch):
    for i in range(2):
        (tmp_path / str(i)).touch()
    part = Deadly(str(tmp_path))
    crew = Crew(free, Plan(2, "cpu"))
    fed = run_tiny([part], engine=Ray.with_crew(crew))
    assert crew.restarts == 2
    assert "2 Ray workers were lost" in fed.engine.notes[1]
    assert not list(tmp_path.iterdir())
    assert not differences(fed, run_tiny([part]))
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    monkeypatch.setattr("consilience.engines.ray.crew.MOST_ATTEMPTS", 2)
    with pytest.raises(WorkerError, match="ended 2 Ray workers"):
        fed.round([1])                 # alone: a worker that dies may take along its last answer, and that client would be blamed
    assert fed.round_number == 2
    crew.close()


@dataclass(frozen=True)
class Noted(Deadly):
    """Also notes which clients were begun."""

    log: str = ""

    def init_scratch(self, c):
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(f"{c.id} ")
        return super().init_scratch(c)


@federation
def test_what_a_lost_worker_had_ended_is_neither_done_again_nor_blamed(free, tmp_path, monkeypatch):
    """Answers of a worker may be heard after its loss: the last first, here."""
    files = tmp_path / "files"
    files.mkdir()
    (files / "a").touch()
    part = Noted(str(files), str(tmp_path / "log"))
    wait = ray.wait

    def last_first(refs, num_returns, timeout):
        ready = wait(refs, num_returns=len(refs), timeout=5)[0]
        return ready[-1:], []

    monkeypatch.setattr("consilience.engines.ray.crew.ray.wait", last_first)
    crew = Crew(free, Plan(1, "cpu"))
    fed = tiny_federation([part], engine=Ray.with_crew(crew))
    fed.round()
    begun = (tmp_path / "log").read_text(encoding="utf-8").split()
    crew.close()
    assert crew.restarts == 1
    assert begun.count("1") == 2
    assert len(begun) == len(set(begun)) + 1                                     # the others once


@federation
def test_a_worker_killed_from_outside(crew, capfd):
    fed = tiny_federation([Scaffold()], engine=Ray.with_crew(crew))
    fed.round()
    before = crew.restarts
    ray.kill(next(hand.actor for hand in crew.hands if hand.ready))
    fed.round()
    assert crew.restarts == before + 1
    assert not differences(fed, run_tiny([Scaffold()]))
    assert capfd.readouterr().out == ""                                          # standard output is for results


def _squares(number: int, tell) -> int:
    tell(number + 100)
    if number == 2:
        os._exit(3)
    return number * number


@federation
def test_jobs(free):
    heard: dict[int, int] = {}
    ended = dict(each_job(free, _squares, [(n,) for n in range(4)], on_gpu=False, at_once=2, heard=heard.__setitem__))
    assert {n: r for n, r in ended.items() if n != 2} == {0: 0, 1: 1, 3: 9}
    assert isinstance(ended[2], Lost)
    assert all(heard[n] == n + 100 for n in heard)


@federation
def test_the_same_comparison_on_two_workers_and_on_one_machine(free, tmp_path):
    base = RunConfig.make({"rounds": 2, "clients": 4, "train_fraction": 0.3})
    how = {"methods": ["fedavg", "scaffold+dbe"], "base": base, "seeds": [0, 1]}
    one, other = compare_config(**how, jobs=1, out=tmp_path / "one"), compare_config(**how, on="ray", out=tmp_path / "two")
    assert one.document() == other.document()
    assert not one.failures
    assert not other.failures
    final = lambda folder: {p.parent.parent.name: p.read_bytes() for p in folder.glob("*/final/global.safetensors")}
    assert final(tmp_path / "one") == final(tmp_path / "two")
    assert len(final(tmp_path / "two")) == 6
    assert not list((tmp_path / "two").glob(".ray-*"))
    assert ray.is_initialized()                                                  # what we did not start stays


@federation
def test_a_run_with_its_clients_on_ray(free):
    settings = {"rounds": 2, "clients": 4, "train_fraction": 0.2}
    one, other = run("scaffold+dbe", engine="sequential", **settings), run("scaffold+dbe", engine="ray", **settings)
    strip = lambda result: [{k: v for k, v in r.items() if k != "measured"} for r in result.records]
    assert strip(one) == strip(other)
    assert [other.measured[k] for k in ("engine", "processes", "devices")] == ["ray", 2, ["cpu", "cpu"]]
    assert "this machine's own (1 machine, 2 cores)" in other.measured["why"]
    assert other.measured["notes"] == ["the workers were on 1 machine"]


@federation
def test_the_choice(cluster):
    fed = tiny_federation()
    choice = choose.choose("ray", fed, cores=2)
    assert (choice.name, choice.processes, choice.twins, choice.starts_processes) == ("ray", 2, 0, True)
    assert choose.choose("ray", fed, workers=1).processes == 1
