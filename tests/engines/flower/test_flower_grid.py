"""Our parcels as Flower's messages, and waiting for answers by our deadline."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

flwr_app = pytest.importorskip("flwr.app", reason="needs the extra 'flower'")

from consilience.engines.flower import client_app, server_app  # noqa: E402
from consilience.engines.flower import grid as module  # noqa: E402
from consilience.engines.flower.grid import FlowerLink, pack, unpack  # noqa: E402
from consilience.engines.flower.parcel import Parcel, Raw, Refused, Silent  # noqa: E402
from consilience.errors import ConfigError  # noqa: E402

TENSORS = {"a": {"b": torch.linspace(-1, 2, 12).reshape(3, 4), "flag": torch.tensor([True, False])}, "n": torch.tensor(7),
           "empty": torch.zeros(0, 5)}


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class FakeGrid:
    """Answers after so many seconds; None: never."""

    def __init__(self, clock: Clock, after: dict[int, float | None], change: Any = lambda reply: reply) -> None:
        self.clock, self.after, self.change = clock, after, change
        self.sent: dict[str, Any] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.after)

    def push_messages(self, messages: list[Any]) -> list[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
            self.sent[message.metadata.message_id] = message
        return [m.metadata.message_id for m in messages]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        out = []
        for i in ids:
            node = self.sent[i].metadata.dst_node_id
            if self.after[node] is not None and self.clock.at >= self.after[node]:
                out.append(self.change(flwr_app.Message(self.sent[i].content, reply_to=self.sent[i])))
        return out


@pytest.fixture(autouse=True)
def _somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message needs a sender; in a run Flower sets who that is."""
    from flwr.supercore.task_identity import TaskIdentity
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def _ask(clock: Clock, after: dict[int, float | None], seconds: float, least: int = 0, change: Any = lambda reply: reply) -> dict[int, Any]:
    link = FlowerLink(FakeGrid(clock, after, change))  # type: ignore[arg-type]
    return dict(link.ask({node: Parcel.of({"round": 1}, TENSORS) for node in link.nodes()}, "train", seconds, least))


def test_parcels_come_back_as_they_were() -> None:
    back = unpack(pack(Parcel.of({"round": 3, "loss": 0.1, "cohort": [0, 2]}, TENSORS)))
    assert back.about == {"round": 3, "loss": 0.1, "cohort": [0, 2]}
    assert set(back.arrays) == {"a/b", "a/flag", "n", "empty"}
    assert torch.equal(back.arrays["a/b"].read("a/b", TENSORS["a"]["b"]), TENSORS["a"]["b"])
    assert all(torch.equal(back.arrays[k].read_any(k), t) for k, t in (("a/flag", TENSORS["a"]["flag"]), ("n", TENSORS["n"])))


def test_arrays_are_flower_s_own() -> None:
    """Flower and its modules can read what we send, and we what they send; neither unpickles."""
    sent = pack(Parcel.of({}, TENSORS))["arrays"]
    assert (sent["a/b"].numpy() == TENSORS["a"]["b"].numpy()).all()
    theirs = flwr_app.Array(TENSORS["a"]["b"].numpy())
    assert torch.equal(Raw(theirs.dtype, theirs.shape, theirs.data).read("x", TENSORS["a"]["b"]), TENSORS["a"]["b"])
    import numpy as np
    evil = flwr_app.Array("object", (1,), "numpy.ndarray", _pickled(np.array([print], dtype=object)))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        evil.numpy()
    with pytest.raises(Refused):
        Raw(evil.dtype, evil.shape, evil.data).read_any("x")
    with pytest.raises(Refused):
        Raw("float32", (1,), evil.data).read("x", torch.zeros(1))


def _pickled(array: Any) -> bytes:
    import io

    import numpy as np
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def test_the_deadline_ends_a_round(clock: Clock) -> None:
    found = _ask(clock, {1: 2.0, 2: None, 3: 40.0}, 10.0)
    assert isinstance(found[1], Parcel)
    assert [(type(found[i]), str(found[i])) for i in (2, 3)] == [(Silent, "no answer in 10 s")] * 2
    assert 10.0 <= clock.at < 13.0


def test_without_a_deadline_all_are_waited_for(clock: Clock) -> None:
    found = _ask(clock, {1: 2.0, 2: 5000.0}, 0.0)
    assert all(isinstance(answer, Parcel) for answer in found.values())


def test_late_answers_are_waited_for_while_too_few_came(clock: Clock) -> None:
    found = _ask(clock, {1: 2.0, 2: 30.0, 3: 100.0}, 10.0, least=2)
    assert isinstance(found[2], Parcel)
    assert isinstance(found[3], Refused)
    assert 30.0 <= clock.at < 35.0


def test_what_a_grid_reports_is_passed_on(clock: Clock) -> None:
    error = lambda reply: flwr_app.Message(flwr_app.Error(5, "node\nunavailable"), reply_to=_asked(reply))
    found = _ask(clock, {1: 0.0}, 5.0, change=error)[1]
    assert (type(found), str(found)) == (Silent, "Flower reports error 5: node unavailable")
    expired = lambda reply: flwr_app.Message(flwr_app.Error(3, "Message Unavailable"), reply_to=_asked(reply))
    found = _ask(clock, {1: 0.0}, 5.0, change=expired)[1]
    assert (type(found), str(found)) == (Silent, "no answer in time")
    raised = lambda reply: flwr_app.Message(flwr_app.Error(2, "DataError"), reply_to=_asked(reply))
    assert type(_ask(clock, {1: 0.0}, 5.0, change=raised)[1]) is Refused

    def foreign(reply: Any) -> Any:
        reply.metadata.__dict__["_src_node_id"] = 9
        return reply
    assert "comes from node 9" in str(_ask(clock, {1: 0.0}, 5.0, change=foreign)[1])
    empty = lambda reply: flwr_app.Message(flwr_app.RecordDict(), reply_to=_asked(reply))
    assert "in place of 'about' and 'arrays'" in str(_ask(clock, {1: 0.0}, 5.0, change=empty)[1])
    other = flwr_app.RecordDict({"about": flwr_app.ConfigRecord({"json": "[1]"}), "arrays": flwr_app.ArrayRecord()})
    endless = flwr_app.RecordDict({"about": flwr_app.ConfigRecord({"json": f'{{"loss": {"9" * 5000}}}'}), "arrays": flwr_app.ArrayRecord()})
    assert "is not JSON" in str(_ask(clock, {1: 0.0}, 5.0, change=lambda reply: flwr_app.Message(endless, reply_to=_asked(reply)))[1])
    assert "no table" in str(_ask(clock, {1: 0.0}, 5.0, change=lambda reply: flwr_app.Message(other, reply_to=_asked(reply)))[1])


def test_what_flower_cannot_read_costs_its_sender_alone(clock: Clock) -> None:
    """Site 2's message is no message. Flower raises while it puts together whatever was asked for with it."""
    class Broken(FakeGrid):
        def pull_messages(self, ids: list[str]) -> list[Any]:
            if any(self.sent[i].metadata.dst_node_id == 2 for i in ids):
                raise KeyError("arraychunk_ids\x1b[2J")
            return super().pull_messages(ids)
    link = FlowerLink(Broken(clock, {1: 0.0, 2: 0.0, 3: 0.0}))  # type: ignore[arg-type]
    found = dict(link.ask({node: Parcel.of({"round": 1}, TENSORS) for node in link.nodes()}, "train", 5.0, 0))
    assert [type(found[i]) for i in (1, 2, 3)] == [Parcel, Refused, Parcel]
    assert str(found[2]) == "Flower cannot read it (KeyError: 'arraychunk_ids\\x1b[2J')"


def test_a_superlink_that_is_away_is_no_fault_of_a_site(clock: Clock) -> None:
    class Away(FakeGrid):
        def pull_messages(self, ids: list[str]) -> list[Any]:
            raise module.httpx.ConnectError("refused")
    with pytest.raises(module.httpx.ConnectError):
        dict(FlowerLink(Away(clock, {1: 0.0})).ask({1: Parcel.of({"round": 1}, TENSORS)}, "train", 5.0, 0))  # type: ignore[arg-type]


def test_an_answer_counts_for_the_node_that_was_asked(clock: Clock) -> None:
    """Node 1 writes into its answer that it comes from node 2 and answers what node 2 was asked."""
    def forged(reply: Any) -> Any:
        if reply.metadata.src_node_id == 1:
            reply.metadata.__dict__.update(_src_node_id=2, _reply_to_message_id="m1")
        return reply
    found = _ask(clock, {1: 0.0, 2: 3.0}, 5.0, change=forged)
    assert "says that it comes from node 2" in str(found[1])
    assert isinstance(found[2], Parcel)


def _asked(reply: Any) -> Any:
    """A message that a reply can be made to again."""
    asked = flwr_app.Message(flwr_app.RecordDict(), reply.metadata.src_node_id, "train")
    asked.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return asked


def test_the_apps_of_a_stub() -> None:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    assert isinstance(server_app(), ServerApp)
    assert isinstance(client_app(), ClientApp)


def test_an_error_of_ours_ends_a_run_without_a_traceback(caplog) -> None:
    """As Flower logs what its ServerApp raises; an unknown error keeps its traceback."""
    context = flwr_app.Context(1, 1, {}, flwr_app.RecordDict(), {"method": "fedavg", "sample": "1,8,8", "classes": 1})
    with pytest.raises(ConfigError, match="'classes'") as raised:
        server_app()(grid=None, context=context)                 # type: ignore[arg-type]
    flower = logging.getLogger("flwr")
    flower.error("ServerApp raised an exception", exc_info=raised.value)
    assert "ServerApp raised an exception" in caplog.text
    assert "Traceback" not in caplog.text
    with pytest.raises(ZeroDivisionError) as unknown:
        print(1 / 0)
    flower.error("ServerApp raised an exception", exc_info=unknown.value)
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("data", ["arrays(path='{}/none.npz')", "table(path='{}/wards.csv', label=dx)"])
def test_a_site_that_cannot_be_built_tells_the_server_nothing_of_its_files(data, tmp_path, caplog) -> None:
    """That its data cannot be used travels; where they lie and what stands in them is in the site's log alone."""
    (tmp_path / "wards.csv").write_text("age,dx\nMeier,1\n")
    message = flwr_app.Message(pack(Parcel.of({"federation": "0" * 16, "task": "hello", "round": 0})), 1, "query")
    message.metadata.__dict__["_message_id"] = "m"
    context = flwr_app.Context(1, 1, {"site": 0, "data": data.format(tmp_path), "store": str(tmp_path)},
                               flwr_app.RecordDict(), {"method": "fedavg", "sample": "1,8,8", "classes": 3})
    with caplog.at_level(logging.ERROR, "consilience.federation"):
        logging.getLogger("consilience.federation").addHandler(caplog.handler)
        try:
            answer = unpack(client_app()(message, context).content)
        finally:
            logging.getLogger("consilience.federation").removeHandler(caplog.handler)
    assert answer.about["task"] == "hello"
    assert "the site's log says why" in answer.about["error"]
    assert not [word for word in ("none.npz", "Meier", "age", "wards", str(tmp_path)) if word in str(answer.about)]
    assert "none.npz" in caplog.text or "Meier" in caplog.text
