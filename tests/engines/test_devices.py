"""Several devices give the numbers of one: on the CPU bit for bit, on a GPU to within what slots state."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch

from consilience.core.part import Part
from consilience.engines import Sequential, choose, estimate
from consilience.engines.devices import Devices, existing_devices, parse_devices, share_out
from consilience.engines.store import DiskStore
from consilience.errors import ConfigError
from consilience.metrics.accuracy import score_global, score_personal
from consilience.metrics.local_training import train_all
from consilience.parts import PARTS
from consilience.parts.prox import Prox
from consilience.parts.scaffold import Scaffold
from consilience.runs import run
from consilience.runs.config import RunConfig
from consilience.testing import FEW, differences, largest_difference, run_tiny, snapshot, tiny_federation, trial

NAMES = sorted(PARTS)
TWO = Devices.on(["cpu", "cpu"])


# ---- what the user says ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("text", "names"), [
    ("0-2", ("cuda:0", "cuda:1", "cuda:2")), ("0, 2,3", ("cuda:0", "cuda:2", "cuda:3")), ("cuda:1,cuda:1", ("cuda:1", "cuda:1")),
    ("cuda:0-1,3", ("cuda:0", "cuda:1", "cuda:3")), ("5", ("cuda:5",)), ("cpu,cpu", ("cpu", "cpu")), ("all", ("all",))])
def test_names_of_devices(text, names):
    assert parse_devices(text) == names


@pytest.mark.parametrize(("text", "said"), [
    ("7-0", "should be 0-7"), ("gpu:0", "Did you mean 'cuda:0'"), ("0,,1", "as in 0-7"), ("", "as in 0-7"), ("-1", "as in 0-7"),
    ("1.5", "as in 0-7"), ("cpu,0", "name one kind"), ("all,0", "as in 0-7"), ("0-99999999999", "more than 1024"), ("cuda", "cuda:0")])
def test_what_is_refused(text, said):
    with pytest.raises(ConfigError, match="'devices' option of the run") as caught:
        parse_devices(text)
    assert said in str(caught.value)


def test_devices_that_do_not_exist(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees none on this machine"):
        existing_devices("0-7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert existing_devices("all") == (torch.device("cuda:0"), torch.device("cuda:1"))
    with pytest.raises(ConfigError, match=r"GPU 2, 3, but this machine has 2: 0-1\."):
        existing_devices("0-3")
    assert existing_devices("cpu,cpu") == (torch.device("cpu"),) * 2


@pytest.mark.parametrize(("settings", "said"), [({"device": "cuda:1"}, "contradict"), ({"engine": "workers"}, "engine=workers"),
                                                ({"engine": "ray"}, "engine=ray")])
def test_settings_that_contradict_each_other(settings, said):
    with pytest.raises(ConfigError, match=said):
        RunConfig.make({"devices": "0-1", **settings})


# ---- sharing out -----------------------------------------------------------------------------------------------------

def test_the_largest_go_first_and_to_the_least_loaded():
    # 9 → a; 7 → b; 6 → b, which has 7 against 9; 4 → a, 9 against 13; 2 → a, the first of two with 13
    assert share_out([2, 9, 4, 7, 6], 2) == [[1, 2, 0], [3, 4]]
    assert share_out([1, 1, 1], 2) == [[0, 2], [1]]
    assert share_out([0, 0, 0, 0], 2) == [[0, 2], [1, 3]]
    assert share_out([3], 3) == [[0], [], []]


# ---- the same numbers ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_every_part(name):
    part = trial(PARTS[name])
    one, other = run_tiny([part], sizes=FEW), run_tiny([part], sizes=FEW, engine=TWO)
    assert not differences(one, other)
    assert snapshot(one)[1] == snapshot(other)[1]                   # bookkeeping of the server and of every client


SETTINGS = [{"batchnorm": "local", "optimiser_state": "kept", "momentum": 0.9},
            {"dropout": 0.3, "participation": 0.75, "weights": "samples"}, {"layout": "channels_last", "last_batch": "keep"},
            {"precision": "bfloat16"}]


@pytest.mark.parametrize("policy", SETTINGS, ids=lambda p: ",".join(p))
def test_under_other_policies(policy):
    parts = [Prox(mu=0.1), trial(PARTS["ditto"])]
    assert not differences(run_tiny(parts, **policy), run_tiny(parts, engine=TWO, **policy))


def test_a_stack_on_three_devices():
    parts = [trial(PARTS[n]) for n in ("prox", "scaffold", "anchors", "ffa", "prbm", "mr", "moon")]
    sizes = (24, 17, 5, 40, 33, 8, 19)
    one, other = run_tiny(parts, sizes=sizes), run_tiny(parts, sizes=sizes, engine=Devices.on(["cpu"] * 3))
    assert not differences(one, other)
    assert snapshot(one)[1] == snapshot(other)[1]


@pytest.mark.parametrize("name", ["prox", "ditto", "babu", "bn"])
def test_scores(name):
    part = trial(PARTS[name])
    rows, names = [torch.arange(0, 9), torch.arange(20, 20), torch.arange(40, 44), torch.arange(41, 80)], list("abcd")
    one, other = (run_tiny([part], rounds=1, eval_batch=4, engine=e) for e in (Sequential, TWO))
    assert score_personal(one, rows, names) == score_personal(other, rows, names)
    assert score_global(one, rows, names) == score_global(other, rows, names)


def test_clients_on_disk_and_a_round_that_is_only_played(tmp_path):
    one, other = tiny_federation([Scaffold()]), tiny_federation([Scaffold()], engine=TWO)
    other.clients = DiskStore(other.clients.fresh, tmp_path)
    for fed in (one, other):
        fed.round()
        fed.round([3, 0])
    a, b = train_all(one), train_all(other)                         # a shallow copy of the federation, with clients of its own
    assert a.outcomes.keys() == b.outcomes.keys() == {0, 1, 3}
    assert all(torch.equal(a.aggregated["params"][k], b.aggregated["params"][k]) for k in a.aggregated["params"])
    assert not differences(one, other, only=lambda path: not path.startswith("clients"))
    for number in range(4):
        kept = one.client(number).tensors["kept"]["scaffold"]["c"], other.client(number).tensors["kept"]["scaffold"]["c"]
        assert all(torch.equal(kept[0][k], kept[1][k]) for k in kept[0])


# ---- threads ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Meeting(Part):
    """Two clients wait for each other: one device after another would wait for ever."""

    name = "meeting"

    def init_scratch(self, c):
        if c.id in (0, 3):                                          # the two longest, so they stand first on two devices
            GATE.wait(timeout=20)
        return {}


GATE = threading.Barrier(2)


def test_devices_work_at_the_same_time():
    GATE.reset()
    run_tiny([Meeting()], rounds=1, engine=TWO)
    GATE.abort()                                                    # the clients do meet there: without the gate they fail
    with pytest.raises(threading.BrokenBarrierError):
        run_tiny([Meeting()], rounds=1, engine=TWO)


def looking(fed, number, common, own):
    return threading.current_thread().name, torch.is_grad_enabled(), torch.get_num_threads(), own


@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_takes_over_what_belongs_to_its_caller(threads):
    before = torch.get_num_threads()
    fed = tiny_federation(engine=TWO)
    try:
        torch.set_num_threads(threads)
        with torch.no_grad():
            seen = list(fed.each(looking, [3, 0, 1], None, [7, 8, 9]))
        with torch.enable_grad():
            assert [s[1] for s in fed.each(looking, [0, 1])] == [True, True]
    finally:
        torch.set_num_threads(before)
    assert [s[3] for s in seen] == [7, 8, 9]                        # in order
    assert {s[1] for s in seen} == {False}
    assert {s[2] for s in seen} == {threads}
    assert threading.main_thread().name not in {s[0] for s in seen}


@dataclass(frozen=True)
class Broken(Part):
    """Fails on one client, until it is mended."""

    name = "broken"

    def init_scratch(self, c):
        if c.id == 1 and BROKEN:
            raise ConfigError("client 1 has no luck")
        return {}


BROKEN: list[bool] = []


def test_an_error_on_a_device_undoes_the_round():
    fed = tiny_federation([Broken()], engine=TWO)
    BROKEN.append(True)
    try:
        with pytest.raises(ConfigError, match="client 1 has no luck"):
            fed.round()
    finally:
        BROKEN.clear()
    assert fed.round_number == 0
    fed.round()
    fed.round()
    assert not differences(fed, run_tiny([Broken()]))


def test_leaving_in_the_middle_and_closing():
    fed = tiny_federation(engine=TWO)
    before = set(threading.enumerate())
    results = fed.each(looking, [0, 1, 3])
    next(results)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    results.close()
    fed.engine.close()
    assert fed.engine.twins == []
    assert not any(t.is_alive() for t in started)
    fed.round()                                                     # builds them again
    fed.round()
    assert not differences(fed, run_tiny())
    fed.engine.close()


# ---- runs ------------------------------------------------------------------------------------------------------------

def test_a_run_records_its_devices_and_equals_one_on_a_single_device():
    settings = {"rounds": 2, "clients": 4, "epochs": 1, "validation": 0.1, "train_fraction": 0.2}
    one, other = run("scaffold+dbe", **settings), run("scaffold+dbe", devices="cpu,cpu", **settings)
    assert one.config == other.config                               # where it ran is no part of what was asked
    strip = lambda result: [{k: v for k, v in r.items() if k != "measured"} for r in result.records]
    assert strip(one) == strip(other)
    assert other.measured["devices"] == ["cpu", "cpu"]
    assert other.measured["engine"] == "sequential"
    assert "2 devices" in other.measured["why"]
    assert one.measured["devices"] == ["cpu"]


def test_the_estimate_counts_twins():
    fed = tiny_federation([Scaffold()])
    choice = choose.choose("auto", fed, devices=[torch.device("cpu")] * 2)
    assert (choice.name, choice.devices, choice.twins, choice.threads) == ("sequential", ("cpu", "cpu"), 2, 1)
    assert choose.choose("auto", fed, 1.0, devices=[torch.device("cpu")]).twins == 0
    plain, shared = estimate.estimate(fed, 5, step_seconds=1.0), estimate.estimate(fed, 5, twins=2, step_seconds=1.0)
    assert shared.memory["twins"] > 0
    assert shared.memory_bytes == plain.memory_bytes + shared.memory["twins"]
    assert shared.seconds == plain.seconds / 2


# ---- a GPU -----------------------------------------------------------------------------------------------------------

@pytest.fixture
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.gpu
@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("name", NAMES)
def test_the_same_gpu_twice(name):
    from consilience.engines.slots import Slots
    if name == "dp":
        pytest.importorskip("dp_accounting")
    part = trial(PARTS[name])
    one = run_tiny([part], rounds=3, device="cuda:0", engine=Slots)
    two = run_tiny([part], rounds=3, device="cuda:0", engine=Devices.on(["cuda:0", "cuda:0"]))
    assert largest_difference(one, two) <= 1e-5
    assert all(twin.engine.captured for twin in two.engine.twins), two.engine.notes
    assert {twin.samples.x.data_ptr() for twin in two.engine.twins} == {two.samples.x.data_ptr()}       # the samples lie there once
    two.engine.close()


@pytest.mark.gpu
@pytest.mark.usefixtures("_cuda")
def test_scores_on_the_same_gpu_twice():
    from consilience.engines.slots import Slots
    part = trial(PARTS["ditto"])
    rows, names = [torch.arange(0, 9), torch.arange(20, 20), torch.arange(40, 44), torch.arange(41, 80)], list("abcd")
    one = run_tiny([part], rounds=1, device="cuda:0", eval_batch=4, engine=Slots)
    two = run_tiny([part], rounds=1, device="cuda:0", eval_batch=4, engine=Devices.on(["cuda:0", "cuda:0"]))
    for score in (score_personal, score_global):
        a, b = score(one, rows, names), score(two, rows, names)
        assert a.counts == b.counts
        assert a.values["loss"] == pytest.approx(b.values["loss"], abs=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("_cuda")
def test_a_run_on_the_same_gpu_twice():
    settings = {"rounds": 3, "clients": 6, "epochs": 1}
    one, two = run("scaffold", device="cuda", **settings), run("scaffold", devices="cuda:0,cuda:0", **settings)
    assert two.measured["devices"] == ["cuda:0", "cuda:0"]
    assert two.measured["engine"] == "slots"
    assert largest_difference(one.federation, two.federation) <= 1e-4


@pytest.mark.gpu
@pytest.mark.usefixtures("_cuda")
def test_every_gpu_of_the_machine():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    from consilience.engines.slots import Slots
    everything = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for name in ("scaffold", "anchors", "ditto", "mr"):
        one = run_tiny([trial(PARTS[name])], rounds=3, device="cuda:0", engine=Slots)
        many = run_tiny([trial(PARTS[name])], rounds=3, device="cuda:0", engine=Devices.on(everything))
        assert largest_difference(one, many) <= 1e-5
        many.engine.close()
