"""The way to the sites through Flower: a grid of SuperNodes behind a SuperLink.

All that knows Flower's messages is here and in apps.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from .parcel import Parcel, Raw, Refused, Silent, plain, read_about, write_about

log = logging.getLogger("consilience.federation")
KINDS = {"hello": "query", "consult": "query", "train": "train", "score": "evaluate"}      # Flower's kinds of messages
NUMPY = "numpy.ndarray"
FIRST_LOOK, LAST_LOOK = 0.1, 2.0        # seconds between two looks for answers, growing
NOT_HEARD = (ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED)
NO_LIMIT = 7 * 24 * 3600.0              # a message's life where no deadline is set


def pack(parcel: Parcel) -> RecordDict:
    arrays = {name: Array(raw.dtype, tuple(raw.shape), NUMPY, raw.data) for name, raw in parcel.arrays.items()}
    return RecordDict({"about": ConfigRecord({"json": write_about(parcel.about)}), "arrays": ArrayRecord(arrays)})


def unpack(content: RecordDict) -> Parcel:
    """A message's content; arrays stay bytes until they are checked. Flower's own Array.numpy, which reads with
    allow_pickle=False, is not called: it believes what an array says of its size.
    """
    said, held = content.get("about"), content.get("arrays")
    if len(content) != 2 or not isinstance(said, ConfigRecord) or not isinstance(held, ArrayRecord):
        raise Refused(f"the message holds {plain(sorted(map(str, content))[:5], 200)} in place of 'about' and 'arrays'")
    about = read_about(said.get("json"))
    arrays: dict[str, Raw] = {}
    for name, array in held.items():
        if array.stype != NUMPY:
            raise Refused(f"{name[:80]!r} is written as {array.stype[:40]!r}, not as {NUMPY!r}")
        arrays[name] = Raw(array.dtype, tuple(array.shape), array.data)
    return Parcel(about, arrays)


class FlowerLink:
    """Flower's grid, with our deadline instead of its waiting."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> list[int]:
        return sorted(self.grid.get_node_ids())

    def ask(self, requests: Mapping[int, Parcel], task: str, seconds: float, least: int) -> Iterator[tuple[int, Parcel | Refused]]:
        start, answered = time.monotonic(), 0
        life = seconds if seconds and not least else NO_LIMIT          # beyond it the SuperLink forgets message and answer
        waiting: dict[str, int] = {}                     # message -> node
        for node, parcel in requests.items():            # one by one: a message may be as large as the model
            question = Message(pack(parcel), node, KINDS[task], ttl=life, group_id=str(parcel.about.get("round", "")))
            sent = [i for i in self.grid.push_messages([question]) if i]
            if sent:
                waiting[sent[0]] = node
            else:
                yield node, Refused("the SuperLink did not take the message")
        pause = FIRST_LOOK
        while waiting:
            for message, node in list(waiting.items()):
                content = self._answer(message, node)
                if content is not None:
                    del waiting[message]
                    answered += isinstance(content, Parcel)
                    yield node, content
                    pause = FIRST_LOOK
            if seconds and time.monotonic() - start >= seconds and answered >= least:
                break
            if waiting:
                time.sleep(pause)
                pause = min(pause * 1.3, LAST_LOOK)
        for node in waiting.values():
            yield node, Silent(f"no answer in {seconds:g} s")

    def _answer(self, message: str, node: int) -> Parcel | Refused | None:
        """The answer to one message; None where there is none yet. Asked for alone: what Flower cannot put together takes with it
        whatever it came with, and whose answer it is follows from the question, not from what the answer says of itself.
        """
        try:
            for reply in self.grid.pull_messages([message]):
                return _content(reply, message, node)
        except httpx.HTTPError:                      # the SuperLink is away: no fault of this node's
            raise
        except Exception as error:
            return Refused(f"Flower cannot read it ({type(error).__name__}: {plain(error, 200)})")
        return None


def _content(reply: Message, message: str, asked: int) -> Parcel | Refused:
    if reply.has_error():
        if reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE:          # the question has reached the end of its life
            return Silent("no answer in time")
        kind = Silent if reply.error.code in NOT_HEARD else Refused
        return kind(f"Flower reports error {reply.error.code}: {plain(reply.error.reason, 300)}")
    if reply.metadata.src_node_id != asked or reply.metadata.reply_to_message_id != message:
        return Refused(f"it says that it comes from node {reply.metadata.src_node_id}, or answers another message")
    try:
        return unpack(reply.content)
    except Refused as error:
        return error
