"""What the server sends, as far as a site does not have it: the part of the model that travels, and the parts' shared state.

Each tensor has a digest of its content. The server remembers what a site held when it last answered and leaves that out; a
site that misses something (a new disk, a restored backup) says so, and gets everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from ... import tree
from ...core.federation import Federation
from .parcel import Raw, Refused


def digest_of(raw: Raw) -> str:
    return hashlib.blake2b(raw.data, digest_size=16).hexdigest()


class Broadcast:
    """The server's side: the same for all sites that receive the model in this round."""

    def __init__(self, fed: Federation) -> None:
        travelling = {half: {k: w for k, w in flat.items() if k in fed.spec.shared} for half, flat in fed.model.items()}
        self.arrays = {path: Raw.of(leaf) for path, leaf in tree.paths({"model": travelling, "shared": fed.shared})}
        self.guarded = bool(fed.method.using("release"))           # what leaves a site is then measured from the server's model
        self.digests = {path: digest_of(raw) for path, raw in self.arrays.items()}

    def listed(self, alone: bool) -> dict[str, str]:
        """path -> digest of what a site works with. One that goes on from its own model needs none, unless its uploads are guarded."""
        without = alone and not self.guarded
        return {path: digest for path, digest in self.digests.items() if not (without and path.startswith("model/"))}

    def beyond(self, listed: Mapping[str, str], held: Mapping[str, str]) -> dict[str, Raw]:
        """What a site does not have yet."""
        return {path: self.arrays[path] for path, digest in listed.items() if held.get(path) != digest}


class Receiver:
    """A site's side: puts together what came and what it had."""

    def __init__(self, held: Mapping[str, Tensor]) -> None:
        self.arrays = {path: Raw.of(tensor) for path, tensor in held.items()}

    def receive(self, listed: Mapping[str, str], came: Mapping[str, Raw]) -> bool:
        """Whether everything listed is here, with the content that its digest names. What is no longer listed is forgotten."""
        now = {path: came.get(path, self.arrays.get(path)) for path in listed}
        if any(raw is None or digest_of(raw) != listed[path] for path, raw in now.items()):
            return False
        self.arrays = {path: raw for path, raw in now.items() if raw is not None}
        return True

    def settle(self, fed: Federation) -> None:
        """Put it into the site's federation. What does not travel stays as it is there; a round's own values replace it."""
        expected = dict(tree.paths({"model": fed.model, "shared": fed.shared}))
        for path in self.arrays.keys() - expected.keys():
            raise Refused(f"the broadcast holds {path[:80]!r}, which this method does not know")
        new = {path: self.arrays[path].read(path, like) if path in self.arrays else like for path, like in expected.items()}
        both = tree.like({"model": fed.model, "shared": fed.shared}, new)
        fed.model, fed.shared = both["model"], both["shared"]

    def tensors(self) -> dict[str, Tensor]:
        return {path: raw.read_any(path) for path, raw in self.arrays.items()}
