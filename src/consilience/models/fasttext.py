"""fastText for AG News, as PFLlib and DBE train it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import ConfigError
from ..options import option
from .architecture import Need, Projected


class TokenMean(nn.Module):
    """The mean over all tokens, padding included."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@dataclass(frozen=True)
class Fasttext(Projected):
    """An embedding (token 0 is padding), the mean over the tokens, a linear layer, a linear head.

    The released code ends in a log-softmax that, once the head is split off, acts on the hidden vector: `log_softmax`
    brings that back. On the logits it would change nothing, so there is none.
    """

    width: int = option(32, "width of the embedding and of the hidden layer", low=1)
    log_softmax: bool = option(False, "log-softmax on the features, as the released code of DBE has it")

    name = "fasttext"
    example = ((200,), 4)
    vocabulary = 98_635

    def body(self, need: Need) -> dict[str, nn.Module]:
        if not need.vocabulary:
            raise ConfigError("Model 'fasttext' needs tokens: samples of whole numbers and a vocabulary. "
                              "These data have none.")
        neck: list[nn.Module] = [nn.Linear(self.width, self.width)]
        if self.log_softmax:
            neck.append(nn.LogSoftmax(1))
        return {"embedding": nn.Embedding(need.vocabulary, self.width, padding_idx=0), "mean": TokenMean(),
                "neck": nn.Sequential(*neck)}
