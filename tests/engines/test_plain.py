"""What travels between processes in every round is JSON and bytes: it arrives as it left, and can call nothing."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from consilience import memory, rng
from consilience.core.client import ClientState, Outcome, train_client
from consilience.engines import Sequential, _wire
from consilience.engines._parcel import Reader, Region
from consilience.engines._plain import decode, describe_error, encode, rebuild_error
from consilience.engines._pool import Pool
from consilience.engines.workers import Workers
from consilience.errors import ConfigError, NonFiniteError
from consilience.testing import differences, run_tiny, tiny_net, tiny_population

STATE = ClientState({"kept": {"a": {"w": torch.arange(6.0).view(2, 3)}}, "own": {}}, first=False, seen=3, own_round=2)


def there_and_back(value, tmp_path: Path, copy: bool = False):
    parcel = Region(tmp_path, f"r{copy}").write(value)
    return Reader(tmp_path).read(json.loads(json.dumps(parcel)), copy=copy)


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, ClientState):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


@pytest.mark.parametrize("value", [
    None, True, -3, 2**70, 0.1, math.inf, math.nan, "ä\n", [], (), {}, (1, [2, (3,)], {"a": None}), {3: "three", "4": 4, (1, 2): [True]},
    torch.zeros(0, 3), torch.tensor(5), torch.tensor([True, False]), rng.normal(rng.key(0), (3,)).bfloat16(),
    rng.normal(rng.key(1), (2, 4, 3, 3)),
    rng.normal(rng.key(1), (2, 4, 3, 3)).contiguous(memory_format=torch.channels_last), STATE,
    Outcome(STATE, {"p": {"up": torch.ones(2)}}, {"params": {"w": torch.eye(2)}, "buffers": {}}, torch.tensor([1.0, 0.5]))],
    ids=lambda v: type(v).__name__)
def test_values_arrive_as_they_left(value, tmp_path):
    assert same(there_and_back(value, tmp_path), value)
    assert same(there_and_back(value, tmp_path, copy=True), value)


def test_a_tensor_met_twice_lies_there_once(tmp_path):
    t = rng.normal(rng.key(2), (1000,))
    a, b = there_and_back((t, t), tmp_path)
    assert a is b
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 2 * t.numel() * 4


class Stranger:
    """Of no kind that may travel."""


@pytest.mark.parametrize("value", [Stranger(), {1, 2}, b"bytes", lambda: 0, iter(())], ids=lambda v: type(v).__name__)
def test_other_values_are_refused(value, tmp_path):
    with pytest.raises(TypeError, match="cannot travel to or from a worker process"):
        Region(tmp_path, "r").write({"deep": [value]})


def test_only_who_takes_orders_finds_functions(tmp_path):
    parcel = Region(tmp_path, "r").write((train_client, 1))
    assert Reader(tmp_path, orders=True).read(parcel, copy=False) == (train_client, 1)
    with pytest.raises(ValueError, match="not allowed"):
        Reader(tmp_path).read(parcel, copy=False)
    for document in ({"function": ["os", "system"]}, {"call": 1}, {"record": "Popen", "fields": {"args": "true"}}):
        with pytest.raises((ValueError, KeyError)):
            decode([document], lambda n: torch.zeros(n))


def test_errors_keep_their_class_where_it_is_known():
    for error in (ConfigError("batch"), NonFiniteError("loss"), ValueError("a", 2), KeyError("k")):
        again = rebuild_error(json.loads(json.dumps(describe_error(error))))
        assert (type(again), again.args) == (type(error), error.args)
    assert describe_error(ValueError(Stranger())) is None
    assert rebuild_error(["no_such_module", "Error", []]) is None
    assert rebuild_error(["subprocess", "Popen", ["true"]]) is None          # no exception
    assert rebuild_error(["os", "system", ["true"]]) is None
    assert encode([1, "a"], lambda t: 0) == [1, "a"]


@pytest.mark.skipif(os.name != "posix", reason="Windows replaces no file that is mapped")
def test_a_path_that_has_come_to_mean_another_file_is_mapped_anew(tmp_path):
    """As the path of a temporary file does, which is a number of a handle: the next file gets the number of one that was closed."""
    region, reader, path = Region(tmp_path, "r"), Reader(tmp_path), tmp_path / "data"
    for values in (torch.arange(4.0), torch.arange(10.0, 14.0)):
        values.numpy().tofile(tmp_path / "new")
        os.replace(tmp_path / "new", path)
        assert torch.equal(reader.read(region.write(memory.map_file(path, torch.float32, (4,))), copy=True), values)


def test_no_message_is_a_pickle(monkeypatch):
    """Both directions of a whole run, seen on the pipe: JSON. The worker's side is looked at in its sources."""
    sent, heard = [], []
    listening = SimpleNamespace(dumps=lambda m, **how: sent.append(m) or json.dumps(m, **how),
                                loads=lambda m: heard.append(json.loads(m)) or heard[-1])
    monkeypatch.setattr(_wire, "json", listening)         # of the wire alone: others write JSON too
    pool = Pool(1)
    run_tiny(rounds=1, engine=Workers.sharing(pool))
    pool.close()
    assert {m[0] for m in sent} == {"build", "set_up", "work"}
    assert {m[0] for m in heard} == {"ready", "done"}
    folder = Path(_wire.__file__).parent
    users = [f.name for f in folder.glob("_*.py") if "import pickle" in f.read_text()]
    assert users == ["_plan.py"]


def test_frozen_parameters_stay_frozen_in_workers():
    """The plan says of every parameter whether it trains."""
    from consilience.core.federation import Federation
    from consilience.core.method import Method
    from consilience.core.policy import Policy
    from consilience.testing import LAYOUT

    def train(engine) -> Federation:
        net: nn.Module = tiny_net()
        next(net.parameters()).requires_grad_(False)
        fed = Federation(net, LAYOUT, Method([]), tiny_population(), Policy(lr=0.05, batch=8), engine)
        fed.round()
        return fed
    pool = Pool(1)
    one, other = train(Sequential), train(Workers.sharing(pool))
    pool.close()
    first = next(iter(other.model["params"]))
    assert torch.equal(other.model["params"][first], other.spec.model["params"][first])
    assert not differences(one, other)
