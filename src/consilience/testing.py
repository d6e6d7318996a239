"""The contract every part must keep, as checks anyone can run on a part of their own.

    from consilience.testing import check_part
    check_part(MyPart)

The same checks run over all parts of this package in tests/contract.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import rng, tree
from .core.federation import Federation
from .core.layout import Layout
from .core.method import Method
from .core.part import Part
from .core.policy import Policy
from .core.population import Population
from .core.slot import Slot
from .core.snapshot import restore, snapshot
from .data.federated import as_float
from .engines.sequential import Sequential
from .errors import RefusedCombination
from .options import build

SIZES = (24, 17, 5, 40)          # client 2 cannot fill a batch of 8: it makes no step
FEW = (16, 17, 5, 24)            # the same in fewer steps, for the contract
LAYOUT = Layout(head="head", stages=("stage1",), extractor=("stage1", "neck"), header=("header",))


class TinyNet(nn.Module):
    """A model with everything parts ask for: a map, BatchNorm in two places, extractor, header and head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2))
        self.neck = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.header = nn.Linear(12, 12)
        self.head = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.header(self.neck(self.stage1(x))))


def tiny_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return TinyNet()


def tiny_population(sizes: Sequence[int] = SIZES, classes: int = 3) -> Population:
    """Small images whose class and client show in their brightness."""
    total = sum(sizes)
    client = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    y = rng.integers(rng.key(7, "labels"), classes, (total,))
    x = rng.normal(rng.key(7, "pixels"), (total, 1, 8, 8)) + 0.5 * y[:, None, None, None] + 0.3 * client[:, None, None, None]
    rows = tuple(torch.arange(total).split(list(sizes)))
    proxy = rng.normal(rng.key(7, "proxy"), (32, 1, 8, 8))
    return Population(x, y, rows, classes, as_float, tuple(f"client{i}" for i in range(len(sizes))), proxy)


def tiny_federation(parts: Iterable[Part] = (), *, engine: Any = Sequential, sizes: Sequence[int] = SIZES, device: str = "cpu",
                    population: Population | None = None, **policy: Any) -> Federation:
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "batch": 8, "epochs": 2,
                                "weights": "uniform"} | policy
    return Federation(tiny_net(), LAYOUT, Method(parts), population or tiny_population(sizes), Policy(**settings), engine, device)


def run_tiny(parts: Iterable[Part] = (), *, rounds: int = 2, order: Sequence[int] | None = None, **how: Any) -> Federation:
    fed = tiny_federation(parts, **how)
    for _ in range(rounds):
        fed.round(order)
    return fed


def state_of(fed: Federation) -> dict[str, Tensor]:
    """Every tensor a run leaves behind, by path."""
    return snapshot(fed)[0]


def differences(a: Federation, b: Federation, only: Callable[[str], bool] = lambda path: True) -> list[str]:
    """Paths whose tensors are not equal bit for bit."""
    one, other = ({k: v for k, v in state_of(f).items() if only(k)} for f in (a, b))
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [k for k in one if not torch.equal(one[k], other[k])]


def largest_difference(a: Federation, b: Federation) -> float:
    """Of any number in what two runs leave behind; both must have left the same tensors."""
    one, other = state_of(a), state_of(b)
    assert one.keys() == other.keys()
    return max((float((one[k].double() - other[k].double()).abs().max()) for k in one if one[k].numel()), default=0.0)


def in_model(path: str) -> bool:
    return path.startswith("model/")


def trial(cls: type[Part]) -> Part:
    """The part with the settings it declares for a short trial."""
    return build(cls, cls.trial, cls.name)


# ---- steps must not look at values on the host ---------------------------------------------------------------------

class NoHostSync(TorchDispatchMode):
    """Refuses what would make the host wait for the device, or give a shape that depends on values."""

    BAD = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        indexed_by_mask = name.startswith("aten.index") and len(args) > 1 and isinstance(args[1], (list, tuple)) and \
            any(torch.is_tensor(i) and i.dtype == torch.bool for i in args[1])
        if any(bad in name for bad in self.BAD) or indexed_by_mask:
            raise AssertionError(f"a step calls back to the host: {name}")
        return func(*args, **(kwargs or {}))


class WatchedSequential(Sequential):
    """The sequential engine, whose steps may not call back to the host."""

    def steps(self, slot: Slot, phase: Any, sizes: list[int]) -> None:
        with NoHostSync():
            super().steps(slot, phase, sizes)


class GuardedSequential(Sequential):
    """The sequential engine, whose steps may not write to what they only read. A slot holds copies: the round's inputs do not show it."""

    READ = ("received", "previous", "shared", "kept", "plan")

    def steps(self, slot: Slot, phase: Any, sizes: list[int]) -> None:
        shown = {name: getattr(slot, name) for name in self.READ}
        before = tree.clone(shown)
        super().steps(slot, phase, sizes)
        wrong = [path for (path, now), (_, then) in zip(tree.paths(shown), tree.paths(before)) if not torch.equal(now, then)]
        assert not wrong, f"a step wrote to {wrong[:3]}"


class _Tape(TorchDispatchMode):
    """A CUDA graph on the CPU: records the operations of one step and repeats them on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        def flat(out: Any) -> Any:
            return out if isinstance(out, (list, tuple)) else [out]
        for func, args, kwargs, out in self.ops:
            for old, new in zip(flat(out), flat(func(*args, **kwargs))):
                if torch.is_tensor(old) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class ReplayedSequential(Sequential):
    """Records the first step of each phase and batch size, and replays it for every other step, client and round."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tapes: dict[Any, _Tape] = {}

    def steps(self, slot: Slot, phase: Any, sizes: list[int]) -> None:
        for size in sizes:
            key = (id(slot), phase.name, size)
            if key in self.tapes:
                self.tapes[key].replay()
                continue
            with _Tape() as tape:
                self.program.step(slot, phase, size)
            self.tapes[key] = tape


# ---- the contract --------------------------------------------------------------------------------------------------

def _clients(part: Part) -> dict[str, Any]:
    """The clients of the contract. All take part, unless the part chooses who does: where all do, nobody asks it."""
    return {"sizes": FEW} | ({"participation": 2} if Method.has(part, "choose") else {})


def plain_rounds(part: Part) -> Federation:
    """Two ordinary rounds. Three checks look at them or compare with them, and run them themselves where they are not given."""
    return run_tiny([part], **_clients(part))


def check_trains(part: Part, plain: Federation | None = None) -> None:
    """Two rounds leave finite state and finite personalised outputs, and a partner may ask for plain training."""
    fed = plain or plain_rounds(part)
    bad = [k for k, t in state_of(fed).items() if t.is_floating_point() and not t.isfinite().all()]
    assert not bad, f"{part.name}: not finite after two rounds: {bad[:3]}"
    for number in range(fed.size):
        model, taps = fed.personal_model(number)
        x = fed.samples.x[:4]
        assert fed.look(number, fed.client(number), model, x, False, taps).logits.isfinite().all()
    try:
        fed.train_plainly(0, fed.client(0), fed.received(fed.client(0)), 1)
    except Exception as error:
        raise AssertionError(f"{part.name}: plain training (c.train), which partners such as mr and babu ask for, fails with "
                             f"{type(error).__name__}: {error}. Of the hooks of a step, `batch` and `main_loss` alone act there; "
                             "v.plain says so.") from error


def check_unmutated(part: Part) -> None:
    """No hook writes to what it is given: the round's inputs are unchanged by the round."""
    fed = run_tiny([part], rounds=1, **_clients(part))
    inputs = {"model": fed.model, "shared": fed.shared, "server": fed.server, "x": fed.samples.x, "y": fed.samples.y,
              "clients": {str(i): s.tensors for i, s in fed.clients.visited()}}
    before = tree.clone(inputs)
    fed.round()
    wrong = [path for (path, now), (_, then) in zip(tree.paths(inputs), tree.paths(before)) if not torch.equal(now, then)]
    assert not wrong, f"{part.name}: a hook wrote to {wrong[:3]}"
    try:
        run_tiny([part], engine=GuardedSequential, **_clients(part))
    except AssertionError as error:
        raise AssertionError(f"{part.name}: {error}") from None
    slots = {t.data_ptr() for slot in fed.engine.slots.values() for t in tree.leaves(slot.written()) if t.numel()}  # type: ignore[attr-defined]
    kept = [p for i, s in fed.clients.visited() for p, t in tree.paths(s.tensors) if t.numel() and t.data_ptr() in slots]
    assert not kept, f"{part.name}: what a client keeps is the slot's own memory: {kept[:3]}"


def check_order(part: Part, plain: Federation | None = None) -> None:
    """The order in which clients train changes no bit."""
    order = (0,) if part.pools else (3, 1, 0, 2)
    if plain is None or Method.has(part, "choose"):         # an order says who takes part, and nobody is chosen
        plain = run_tiny([part], sizes=FEW)
    wrong = differences(plain, run_tiny([part], sizes=FEW, order=order))
    assert not wrong, f"{part.name}: depends on the order of clients: {wrong[:3]}"


def check_neutral(part_class: type[Part]) -> None:
    """At its neutral setting FedAvg's model comes out bit for bit, with weights of clients set by the run and left to the method;
    or the part says why it has none.
    """
    if part_class.neutral is None:
        assert part_class.not_neutral, f"{part_class.name}: declare `neutral`, or say in `not_neutral` why there is none"
        return
    part = build(part_class, part_class.neutral, part_class.name)
    for weights in ("uniform", "auto"):
        how = {"weights": weights, **_clients(part)}
        base = run_tiny(**how)
        keys = {k for k in state_of(base) if in_model(k)}
        wrong = differences(base, run_tiny([part], **how), only=keys.__contains__)
        assert not wrong, f"{part.name}: differs from FedAvg at its neutral setting, with weights={weights}: {wrong[:3]}"


def check_capturable(part: Part, plain: Federation | None = None) -> None:
    """Steps never call back to the host, and recorded operations repeated on fixed memory give what the code gives."""
    run_tiny([part], engine=WatchedSequential, **_clients(part))
    wrong = differences(plain or plain_rounds(part), run_tiny([part], engine=ReplayedSequential, **_clients(part)))
    assert not wrong, f"{part.name}: a recorded step differs from the code: {wrong[:3]}"


def check_checkpoint(part: Part) -> None:
    """A run cut in two by a snapshot ends like one that was not."""
    how = _clients(part)
    whole = run_tiny([part], rounds=3, **how)
    first, second = run_tiny([part], rounds=1, **how), tiny_federation([part], **how)
    restore(second, *snapshot(first))
    for _ in range(2):
        second.round()
    wrong = differences(whole, second)
    assert not wrong, f"{part.name}: differs after a checkpoint: {wrong[:3]}"
    assert snapshot(whole)[1] == snapshot(second)[1], f"{part.name}: bookkeeping differs after a checkpoint"


def check_partial_batches(part: Part) -> None:
    """A smaller last batch, and a client of one sample, leave everything finite."""
    fed = run_tiny([part], last_batch="keep", sizes=(24, 17, 1, 11))
    bad = [k for k, t in state_of(fed).items() if t.is_floating_point() and not t.isfinite().all()]
    assert not bad, f"{part.name}: not finite with partial batches: {bad[:3]}"


def check_part(part_class: type[Part], partners: Sequence[Part] = ()) -> None:
    """Put one part through the whole contract, alone and beside the partners given."""
    from .parts.registry import check_class
    check_class(part_class, f"part {part_class.__name__}")
    part = trial(part_class)
    plain = plain_rounds(part)
    check_trains(part, plain)
    check_unmutated(part)
    check_order(part, plain)
    check_neutral(part_class)
    check_capturable(part, plain)
    check_checkpoint(part)
    check_partial_batches(part)
    for partner in partners:
        check_pair(part, partner)


def check_pair(a: Part, b: Part, sizes: Sequence[int] = FEW) -> bool:
    """Two parts together train, and a+b is b+a. False where they are refused, by name and with a reason."""
    reason = Method.conflict(a, b)
    if reason is not None:
        try:
            Method([a, b])
        except RefusedCombination as refusal:
            said = str(refusal)
        assert all(word in said for word in (a.name, b.name, reason)), f"the refusal does not name both parts: {said}"
        return False
    one, other = Method([a, b]), Method([b, a])
    assert one.parts == other.parts, f"{a.name}+{b.name} is folded in another order than {b.name}+{a.name}"
    bad = [k for k, t in state_of(run_tiny([a, b], sizes=sizes)).items() if t.is_floating_point() and not t.isfinite().all()]
    assert not bad, f"{a.name}+{b.name}: not finite: {bad[:3]}"
    return True


def pairs(parts: Sequence[Part]) -> Iterator[tuple[Part, Part]]:
    return itertools.combinations(parts, 2)
