"""Where things are in a model, by the names of its modules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Names of a model's stages and of its split into extractor, header and head.

    A *point* is a module's name (its output), or "name:input" for what enters it; ":input" is what enters the model.
    `extractor` and `header` list the modules they are made of, in the order of the forward pass; the header may be empty.
    Stages are the convolution stages whose outputs are maps (FedFA augments there).
    """

    head: str = "head"
    stages: tuple[str, ...] = ()
    extractor: tuple[str, ...] = ()
    header: tuple[str, ...] = ()

    @property
    def entry(self) -> str:
        """The point of what enters the model."""
        return ":input"

    @property
    def features(self) -> str:
        """The point whose value the head receives."""
        return f"{self.head}:input"

    @property
    def extracted(self) -> str:
        """The point at the end of the extractor; equal in value to `features` when there is no header."""
        return self.extractor[-1] if self.extractor and self.header else self.features

    def region(self, key: str) -> str:
        """'head', 'header' or 'extractor': the region a parameter belongs to. What is not named is extractor."""
        if key.startswith(self.head + "."):
            return "head"
        if any(key.startswith(name + ".") for name in self.header):
            return "header"
        return "extractor"
