"""What the starter does when the SuperNode takes an answer badly, without either process."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from consilience.engines.flower import starter


def test_an_answer_that_was_cut_off_is_handed_over_again(monkeypatch):
    """The SuperNode waits for the arrays of an answer it knows of; they must come, or the site never answers again."""
    calls = []

    def push(client, reply, context):
        calls.append((client, reply, context))
        if len(calls) < 3:
            raise ObjectPushError("array", 1, "session")

    monkeypatch.setattr(starter, "push_message", push)
    monkeypatch.setattr(starter, "PAUSE", 0.0)
    starter.hand_over("client", "reply", "context")
    assert calls == [("client", "reply", "context")] * 3


def test_it_is_given_up_in_the_end(monkeypatch):
    def push(client, reply, context):
        raise ObjectPushError("array", 1, "session")

    monkeypatch.setattr(starter, "push_message", push)
    monkeypatch.setattr(starter, "PAUSE", 0.0)
    with pytest.raises(ObjectPushError):
        starter.hand_over("client", "reply", "context")
