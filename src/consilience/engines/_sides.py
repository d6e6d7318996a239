"""What clients are asked outside training, on a few streams of a GPU in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

SIDES = 4


class Sides:
    """The streams; `asking` while clients are being asked on them."""

    def __init__(self) -> None:
        self.streams: list[torch.cuda.Stream] = []
        self.asking = False

    def ask(self, task: Callable[[int, Any, Any], Any], numbers: Sequence[int], common: Any, given: Sequence[Any]) -> list[Any]:
        """All answers, before any is handed out: what is freed on a stream is used again there, so nothing of an answer may be
        freed while its stream still serves other clients.
        """
        main = torch.cuda.current_stream()
        while len(self.streams) < min(SIDES, len(numbers)):
            self.streams.append(torch.cuda.Stream())
        begun = main.record_event()
        for stream in self.streams:
            stream.wait_event(begun)
        self.asking = True
        try:
            answers = []
            for place, (number, own) in enumerate(zip(numbers, given)):
                torch.cuda.set_stream(self.streams[place % len(self.streams)])
                answers.append(task(number, common, own))
            return answers
        finally:
            self.asking = False
            torch.cuda.set_stream(main)
            for stream in self.streams:
                main.wait_stream(stream)
