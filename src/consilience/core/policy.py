"""Choices that belong to a run, not to a part. They move results more than most losses do, so each is named and recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError
from ..options import check, coerce, option, parse_call


@dataclass(frozen=True)
class Policy:
    """How clients train and how their models are put together."""

    optimiser: str = option("sgd", "the clients' local optimiser", choices=("sgd", "adam"))
    lr: float = option(0.05, "local learning rate", above=0.0)
    momentum: float = option(0.0, "momentum of local SGD", low=0.0, below=1.0)
    weight_decay: float = option(0.0, "weight decay of the local optimiser", low=0.0)
    schedule: str = option("constant", "learning rate over rounds: constant, exponential(gamma=…), "
                                       "step(every=…, gamma=…) or cosine(rounds=…)")
    batch: int = option(10, "samples in a batch", low=1)
    last_batch: str = option("drop", "an epoch's last, smaller batch: drop it or keep it", choices=("drop", "keep"))
    epochs: int = option(1, "passes over a client's data in a round", low=1)
    steps: int | None = option(None, "local steps in a round, instead of epochs", low=1)
    sampling: str = option("shuffle", "how batches are drawn: every sample once an epoch, or with replacement",
                           choices=("shuffle", "replacement"))
    weights: str = option("auto", "weight of a client in the average; auto: what the method's parts prefer, else samples",
                          choices=("auto", "samples", "uniform"))
    batchnorm: str = option("all", "normalisation layers with running statistics: average all of them, parameters only "
                                   "(statistics stay on the client), or keep them local altogether",
                            choices=("all", "params", "local"))
    optimiser_state: str = option("reset", "the local optimiser's state between rounds", choices=("reset", "kept"))
    participation: float = option(1.0, "clients of a round: a fraction (1 means all), or a number of clients from 2 up", above=0.0)
    dropout: float = option(0.0, "chance that a selected client fails before it uploads", low=0.0, below=1.0)
    precision: str = option("float32", "arithmetic of forward and backward passes; weights are float32 in any case",
                            choices=("float32", "bfloat16"))
    layout: str = option("auto", "memory layout of images and convolutions; auto: channels_last on a GPU for models with wide "
                                 "convolutions, else contiguous", choices=("auto", "contiguous", "channels_last"))
    eval_batch: int = option(256, "samples scored at once", low=1)
    seed: int = option(0, "every random draw of the run is keyed by it", low=0, high=2**63 - 1)

    def __post_init__(self) -> None:
        check(self, "the run")
        if self.participation > 1 and not float(self.participation).is_integer():
            raise ConfigError("The 'participation' option of the run must be a fraction up to 1, or a whole number of clients. "
                              f"Got {self.participation} instead.")
        if self.optimiser == "adam" and self.momentum:
            raise ConfigError("The 'momentum' option of the run belongs to SGD; Adam has its own. "
                              "Leave it out, or use optimiser=sgd.")
        Schedule.parse(self.schedule)

    def cohort_size(self, population: int) -> int:
        """How many clients take part in a round."""
        if self.participation > 1:
            size = int(self.participation)
            if size > population:
                raise ConfigError(f"The 'participation' option of the run asks for {size} clients a round, "
                                  f"but there are {population}.")
            return size
        return max(1, round(self.participation * population))

    def lr_at(self, round_number: int) -> float:
        """Learning rate of a round; rounds count from 1."""
        return self.lr * Schedule.parse(self.schedule).factor(round_number)

    def path_length(self, steps: int, lr: float) -> float:
        """Length of the path that a constant unit gradient walks in `steps` steps of SGD with momentum.

        With momentum ρ the k-th step moves by (1 − ρ^k)/(1 − ρ), so the sum is (K − ρ(1 − ρ^K)/(1 − ρ))/(1 − ρ); K without
        momentum. SCAFFOLD, FedNova and FedCM divide by it.
        """
        r = self.momentum
        return lr * (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)


@dataclass(frozen=True)
class Schedule:
    """The learning rate's factor as a function of the round."""

    kind: str
    gamma: float = 1.0
    every: int = 1
    rounds: int = 1

    @staticmethod
    def parse(text: str) -> Schedule:
        what = "The 'schedule' option of the run"
        kind, values = parse_call(text, what)
        allowed = {"constant": (), "exponential": ("gamma",), "step": ("every", "gamma"), "cosine": ("rounds",)}
        if kind not in allowed or set(values) != set(allowed[kind]):
            forms = "constant, exponential(gamma=0.99), step(every=30, gamma=0.1), cosine(rounds=100)"
            raise ConfigError(f"{what} must have one of the forms {forms}. Got {text!r} instead.")
        schedule = Schedule(kind, **{name: coerce(value, float if name == "gamma" else int, f"{what}: {name!r}")
                                     for name, value in values.items()})
        if not 0 < schedule.gamma < math.inf or schedule.every < 1 or schedule.rounds < 1:
            raise ConfigError(f"{what} needs numbers above 0. Got {text!r} instead.")
        return schedule

    def factor(self, round_number: int) -> float:
        done = round_number - 1
        if self.kind == "exponential":
            return self.gamma**done
        if self.kind == "step":
            return self.gamma ** (done // self.every)
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(done, self.rounds - 1) / self.rounds))      # never 0: it stays at its last value
        return 1.0
