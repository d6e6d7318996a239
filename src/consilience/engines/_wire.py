"""Messages between a process and its workers: small JSON documents, each after its length."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

IN_A_WORKER = "CONSILIENCE_WORKER"
_LENGTH = struct.Struct("<Q")


def send(pipe: BinaryIO, message: Any) -> None:
    content = json.dumps(message, separators=(",", ":")).encode()
    pipe.write(_LENGTH.pack(len(content)) + content)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """The next message, or None when the other side is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    length, = _LENGTH.unpack(head)
    content = pipe.read(length)
    return json.loads(content) if len(content) == length else None
