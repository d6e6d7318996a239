"""What a site keeps between rounds, on its own disk, by the round that left it there.

A site writes a new version after every training and deletes none that the server may still go back to: an answer can be lost
on its way, and a server can be started again from an older checkpoint. The broadcast names the last round accepted from the
site, and the site starts from that version. Nothing of it is ever sent.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

import torch
from torch import Tensor

from ... import tree
from ...core.client import ClientState
from ...errors import DataError
from ...runs.files import disk, read_json, read_tensors, whole_folder, write_json, write_tensors
from .parcel import Refused

KEEP = 2                       # accepted versions kept: the server itself keeps two checkpoints
SECRET = 32                    # bytes
_TOKEN = re.compile(r"[0-9a-f]{16}")


def new_token() -> str:
    """A name for a federation that no other has."""
    return secrets.token_hex(8)


class Versions:
    """The states of one site in one federation."""

    def __init__(self, store: str | Path, federation: str, site: int, fresh: ClientState) -> None:
        if not _TOKEN.fullmatch(federation):          # it becomes part of a path
            raise Refused(f"a federation's token has 16 hexadecimal digits. Got {federation[:40]!r} instead")
        self.folder = Path(store).expanduser() / federation / f"site-{site}"
        self.fresh = fresh

    def rounds(self) -> list[int]:
        """Rounds whose state is there, ascending."""
        return sorted(int(p.name.removeprefix("round-")) for p in self.folder.glob("round-*"))

    def at(self, round_number: int) -> ClientState:
        """The state after a round's training; 0 is the state of a site that was never accepted."""
        if round_number == 0:
            return self.fresh
        folder = self._folder(round_number)
        if not folder.is_dir():
            have = ", ".join(map(str, self.rounds())) or "none"
            raise Refused(f"the site's state of round {round_number} is not in its store (rounds there: {have}). Was the store "
                            "emptied or replaced? Put it back from a backup; the federation goes on without the site until then")
        about = read_json(folder / "state.json")
        flat = read_tensors(folder / "state.safetensors", about["sha256"])
        expected: dict[str, Tensor] = dict(tree.paths(self.fresh.tensors))
        if {k: (t.shape, t.dtype) for k, t in flat.items()} != {k: (t.shape, t.dtype) for k, t in expected.items()}:
            raise DataError(f"The state in {str(folder)!r} does not fit this method and model.")
        copied = {k: torch.empty_like(expected[k]).copy_(t) for k, t in flat.items()}      # on the device, in its memory layout
        return ClientState(tree.like(self.fresh.tensors, copied), about["first"], about["seen"], about["own_round"])

    def write(self, round_number: int, state: ClientState, accepted: int) -> None:
        """Keep a round's state; drop what nobody can ask for any more."""
        folder = self._folder(round_number)
        with disk("write the site's state", folder), whole_folder(folder) as draft:
            sha256 = write_tensors(draft / "state.safetensors", dict(tree.paths(state.tensors)))
            write_json(draft / "state.json", {"sha256": sha256, "first": state.first, "seen": state.seen, "own_round": state.own_round})
        older = [r for r in self.rounds() if r <= accepted]
        for old in older[:-KEEP]:
            shutil.rmtree(self._folder(old), ignore_errors=True)
        # Answers that were lost. Those of later rounds stay until they are passed: the server may have gone back, but this may also be an
        # old question that came late, and the server have accepted them. It names none that it has not accepted.
        for lost in self.rounds():
            if accepted < lost < round_number:
                shutil.rmtree(self._folder(lost), ignore_errors=True)

    def _folder(self, round_number: int) -> Path:
        return self.folder / f"round-{round_number:06d}"

    # ---- what the server last sent, so that it need not send it again ------------------------------------------------

    def held(self) -> dict[str, Tensor]:
        """The last broadcast, as far as it can be read."""
        try:
            return read_tensors(self.folder / "held.safetensors")
        except DataError:
            return {}

    def hold(self, tensors: dict[str, Tensor]) -> None:
        write_tensors(self.folder / "held.safetensors", tensors)

    def secret(self) -> bytes:
        """The site's own entropy for noise, made once, readable by its owner alone."""
        return own_secret(self.folder / "secret")


def own_secret(path: Path) -> bytes:
    """Random bytes kept in a file of this side alone."""
    if not path.is_file():
        with disk("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.draft")
            draft.unlink(missing_ok=True)
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(SECRET))
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
    held = path.read_bytes()
    if len(held) != SECRET:                       # an empty one would bring noise that everybody can compute
        raise DataError(f"The secret {str(path)!r} is damaged: it has {len(held)} bytes, not {SECRET}. Bring it back from a backup. Or "
                        "delete it, and another is made: uploads that are sent a second time then carry other noise than the first time, "
                        "and tell more than is counted.")
    return held
