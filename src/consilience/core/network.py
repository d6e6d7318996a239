"""One door for forward passes. A model is {"params", "buffers"}; a Network is the module that can run any such model."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .. import rng, tree
from ..errors import ConfigError
from ..kernels import sgd
from ..kernels.derivatives import differentiable_twice
from ..kernels.reach import Reach
from ..layers.bfloat16 import Arrived, Together
from ..layers.pooling import pool_swiftly
from ..layers.stages import compute_together, in_turn
from ..layers.watch import Watch
from ..tree import Flat
from .part import Model

NORMS = (nn.modules.batchnorm._NormBase,)
_DROPOUTS = {nn.Dropout: None, nn.Dropout1d: 2, nn.Dropout2d: 2, nn.Dropout3d: 2}   # type -> leading dims with own coins

KeySource = Callable[[], Tensor]


class KeyedDropout(nn.Module):
    """Dropout whose coins come from the key of the pass, so that engines and the order of clients do not change them."""

    def __init__(self, p: float, number: int, coin_dims: int | None, holder: dict[str, KeySource | None]) -> None:
        super().__init__()
        self.p, self.number, self.coin_dims, self._holder = p, number, coin_dims, holder

    def forward(self, input: Tensor) -> Tensor:
        x, source = input, self._holder["key"]
        if not self.training or self.p == 0 or source is None:
            return x
        if self.p == 1:
            return x * 0                            # as PyTorch has it; 1/(1 − p) would make the gradient NaN
        dims = x.dim() if self.coin_dims is None else self.coin_dims
        shape = (*x.shape[:dims], *([1] * (x.dim() - dims)))
        keep = rng.uniform(rng.fold(source(), self.number), shape) >= self.p
        return torch.where(keep, x / (1 - self.p), 0.0)


def key_dropout(module: nn.Module, holder: dict[str, KeySource | None]) -> None:
    """Replace every dropout layer by its keyed version, in place; hooks on it stay. `DropPath`-like layers say so by `coin_dims`."""
    for number, (name, layer) in enumerate(list(module.named_modules())):
        if isinstance(layer, KeyedDropout):
            layer._holder = holder                  # keyed by an earlier network around the same module
        coin_dims = getattr(layer, "coin_dims", None)
        if "forward" in layer.__dict__:
            continue                                # somebody gave it another forward
        if type(layer) in _DROPOUTS or (coin_dims is not None and not isinstance(layer, KeyedDropout)):
            dims = _DROPOUTS.get(type(layer), coin_dims)
            keyed = KeyedDropout(float(layer.p), number, dims, holder)
            keyed.__dict__.update({k: v for k, v in layer.__dict__.items() if "_hook" in k})      # who listens goes on listening
            module.set_submodule(name, keyed)


class _Staged:
    """Mixed into a Sequential that runs the stages it had when it was staged."""

    def forward(self, input: Tensor) -> Tensor:
        own = self.__dict__
        return in_turn([own["_modules"][name] for name in own["_order"]], input)


def staged(chain: nn.Sequential) -> nn.Sequential:
    """The same chain, and what is attached to it later does not join. Its names, its hooks and its class's own methods stay."""
    kind = type(chain)
    if kind.forward is nn.Sequential.forward and "forward" not in chain.__dict__:       # else it has its own order
        chain.__class__ = type(kind.__name__, (_Staged, kind), {"__doc__": kind.__doc__})
        chain.__dict__["_order"] = tuple(chain._modules)
    return chain


def in_float32(x: Tensor) -> Tensor:
    """What parts and measures compute with: bfloat16 is a way to compute a model."""
    return x.float() if x.dtype == torch.bfloat16 else x


class _Shown(UserDict[str, Tensor]):
    """What a pass showed at its points, as it came in `data`. A map that nobody looks at is never cast."""

    def __getitem__(self, point: str) -> Tensor:
        return in_float32(self.data[point])


class Trace:
    """What a pass showed: each point before and after the taps, what the taps noted, the logits, and buffers as the pass left them."""

    __slots__ = ("after", "before", "buffers", "logits", "notes")

    def __init__(self) -> None:
        self.before, self.after = _Shown(), _Shown()
        self.buffers: Flat = {}
        self.notes: dict[str, dict[str, Any]] = {}
        self.logits: Tensor = None  # type: ignore[assignment]  # set by the forward pass

    def split(self, sizes: list[int]) -> list[Trace]:
        """One trace for each run of samples, of a pass without taps. The way back joins them in one operation a tensor."""
        out = [Trace() for _ in sizes]
        for point, whole in self.before.data.items():
            for trace, piece in zip(out, whole.split(sizes)):
                trace.before[point] = trace.after[point] = piece
        for trace, piece in zip(out, self.logits.split(sizes)):
            trace.logits, trace.buffers = piece, self.buffers
        return out


Tap = Callable[[Trace, str, Tensor], Tensor]


class Network:
    """A module through which any model of its shape can run. The module is never the state."""

    def __init__(self, module: nn.Module, points: Iterable[str] = (), half: bool = False, twice: bool = False) -> None:
        self.module, self.points, self.half = module, tuple(points), half      # half: compute in bfloat16
        self.twice = twice                          # gradients of training passes will be differentiated
        self._keys: dict[str, KeySource | None] = {"key": None}
        self._weights = Together(module) if half else None
        self.reads_kernels = False                  # whether the module looks itself at kernels of which passes need a part alone
        self._watch: AbstractContextManager[Any] = nullcontext()
        key_dropout(module, self._keys)
        pool_swiftly(module)
        compute_together(module)
        self._params = self._places("_parameters", module.named_parameters(remove_duplicate=False))
        self._buffers = self._places("_buffers", module.named_buffers(remove_duplicate=False))
        self._modules = list(module.modules())
        self._own_modes = any(type(m).train is not nn.Module.train or "train" in m.__dict__ for m in self._modules)
        self._model: Model | None = None
        self._train: bool | None = None
        self._trace: Trace | None = None
        self._tap: Tap | None = None
        self._ears = [self._listen(point) for point in self.points]

    def close(self) -> None:
        """Stop listening. The module's own hooks stay."""
        for ear in self._ears:
            ear.remove()

    def _places(self, table: str, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, dict[str, Any], str]]:
        """Where every tensor of a model goes. Tied tensors stand in several tables under the name of the first."""
        first: dict[int, str] = {}
        out = []
        for name, tensor in named:
            owner, _, leaf = name.rpartition(".")
            out.append((first.setdefault(id(tensor), name), getattr(self.module.get_submodule(owner), table), leaf))
        return out

    def _listen(self, point: str) -> RemovableHandle:
        name, _, side = point.partition(":")
        try:
            target = self.module.get_submodule(name)
        except AttributeError:
            names = [n for n, _ in self.module.named_modules() if n]
            raise ConfigError(f"The model has no module {name!r} for the point {point!r}. "
                              f"Its modules: {', '.join(names)}.") from None
        if side == "input":
            return target.register_forward_pre_hook(lambda _, args, named: self._enters(point, args, named), with_kwargs=True)
        return target.register_forward_hook(lambda _, args, out: self._at(point, out))

    def _enters(self, point: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The first of what a module is given, by place or by name, is what enters it."""
        if args:
            return (self._at(point, args[0]), *args[1:]), named
        first = next(iter(named))
        return args, {**named, first: self._at(point, named[first])}

    def _at(self, point: str, x: Tensor) -> Tensor:
        trace = self._trace
        if trace is None:
            return x
        if point in trace.before:
            raise ConfigError(f"The point {point!r} is passed twice in one forward pass; name a module that runs once.")
        if x.dim() < 3:
            x = in_float32(x)                       # a vector: few numbers, and a head in float32 has use for all their bits
        trace.before[point] = x
        after = x if self._tap is None else self._tap(trace, point, x)
        trace.after[point] = after
        return after.to(x.dtype)                    # a map goes on as it came: a sum with it is not to be float32

    def hold(self, model: Model) -> None:
        """Before the way back of a training pass: layers under torch.utils.checkpoint run again there, with what the module then holds."""
        self._hold(model, True)

    def _hold(self, model: Model, train: bool) -> None:
        """Make the module's parameters and buffers be those of `model`."""
        if model is not self._model:
            params, buffers = model["params"], model["buffers"]
            for key, table, leaf in self._params:
                table[leaf] = params[key]
            for key, table, leaf in self._buffers:
                table[leaf] = buffers[key]
            self._model = model
        if train is not self._train:
            if self._own_modes:
                self.module.train(train)            # somebody's own way: normalisation layers that stay frozen, say
            else:
                for m in self._modules:
                    m.training = train
            self._train = train

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Around what a tap may ask for in the midst of a pass, which goes on as it was."""
        trace, tap, key, model, train = self._trace, self._tap, self._keys["key"], self._model, self._train
        try:
            yield
        finally:
            self._trace, self._tap, self._keys["key"] = trace, tap, key
            if trace is not None and model is not None:
                self._hold(model, bool(train))

    def forward(self, model: Model, x: Tensor, train: bool = False, tap: Tap | None = None,
                update_buffers: bool = False, key: KeySource | None = None) -> Trace:
        """Run the model. Only a pass with update_buffers writes (in place) to model["buffers"]."""
        if train and model["buffers"] and not update_buffers:
            model = {"params": model["params"], "buffers": tree.clone(model["buffers"])}
        trace = Trace()
        trace.buffers = model["buffers"]
        with self._within(), differentiable_twice() if self.twice and train else nullcontext():
            self._hold(model, train)
            self._trace, self._tap, self._keys["key"] = trace, tap, key
            if self._weights is not None:
                with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False), self._weights, self._watch:
                    trace.logits = self.module(x).float()
            else:
                trace.logits = self.module(x)
        return trace

    def collecting(self, weights: Iterable[Tensor]) -> AbstractContextManager[list[Arrived]]:
        """Gradients of these weights that arrive in bfloat16 in the meantime are collected as they come; autograd has none of them."""
        return nullcontext([]) if self._weights is None else self._weights.collecting(weights)

    def keep(self, weight: Tensor, narrow: Tensor, part: Reach | None) -> None:
        """`narrow` is the weight in bfloat16, as far as it is in reach; passes take it until `forget`."""
        if self._weights is not None:
            self._weights.keep(weight, narrow, part)

    def forget(self, weights: Iterable[Tensor] | None = None) -> None:
        """These weights, or all, may have changed since they were kept in bfloat16."""
        if self._weights is not None:
            self._weights.forget(weights)

    def apply(self, model: Model, name: str, x: Tensor, train: bool = True) -> Tensor:
        """Run one submodule (an attached projection, the head) of the model, as in training; no statistic moves."""
        part = self.module.get_submodule(name)
        if next(part.buffers(), None) is not None:
            model = {"params": model["params"], "buffers": tree.clone(model["buffers"])}
        with self._within():
            self._hold(model, train)
            if self._weights is not None:
                self._weights.leave(part.modules())
            self._trace = None
            return part(x)

    def probe(self, model: Model, x: Tensor) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
        """Every point fires exactly once, no draw from the global generator; returns the shape at each point and of the logits."""
        before = torch.get_rng_state()
        key = lambda: rng.key(0, "probe").to(x.device)
        with torch.no_grad():
            trace = self.forward(model, x, train=True, key=key)
        self.reads_kernels = self._watched(model, x, key)
        self._hold(model, True)                     # the module must not keep the statistics of the probe
        missing = [p for p in self.points if p not in trace.before]
        if missing:
            names = [n for n, _ in self.module.named_modules() if n]
            raise ConfigError(f"The points {', '.join(missing)} never fire in a forward pass. "
                              f"The model's modules: {', '.join(names)}.")
        if not torch.equal(before, torch.get_rng_state()):
            raise ConfigError(f"The model {type(self.module).__name__} draws from torch's global generator in training, so runs "
                              "could not be repeated. Use nn.Dropout layers (they are keyed) in place of functional dropout.")
        return {p: tuple(h.shape[1:]) for p, h in trace.before.items()}, tuple(trace.logits.shape[1:])

    def _watched(self, model: Model, x: Tensor, key: KeySource) -> bool:
        """Whether the module's own code reads kernels that are cut, in a pass as of training. Its layers have theirs laid ready then."""
        cut = [] if self._weights is None else self._weights.cut_kernels()
        if not (cut and sgd.usable(cut)):     # else no step of theirs is put off, and nobody can see one that is behind
            return False
        self._watch = watch = Watch(cut)
        try:
            with torch.enable_grad():
                self.forward(model, x, train=True, key=key)
        finally:
            self._watch = nullcontext()
        return watch.found

    @torch.no_grad()
    def keeps_samples_apart(self, model: Model, x: Tensor) -> bool:
        """Whether a training pass treats every sample as if it were alone. Tried on two samples, which have to differ to show it: what
        each of them gives must not depend on the other, on its place, or on how many there are (two, and seven).
        """
        if torch.equal(x[0], x[1]) or any(isinstance(m, NORMS) or (isinstance(m, KeyedDropout) and m.p) for m in self._modules):
            return False
        tried = {"params": model["params"], "buffers": tree.clone(model["buffers"])}
        orders = [0, 1], [1, 0], [0, 0], [1, 0, 0, 1, 1, 1, 0]
        passes = [self.forward(tried, x[order], train=True, update_buffers=True) for order in orders]
        self._hold(model, True)

        def apart(*outs: Tensor) -> bool:
            """Whether both samples give the same in every pass. A library may round otherwise from call to call, and for seven samples
            choose a kernel with shorter numbers than for two: TF32, or another order of sums in bfloat16.
            """
            if any(len(out) != len(order) for out, order in zip(outs, orders)):
                return False
            *two, seven = (outs[0][order] for order in orders)
            near = all(torch.allclose(out, want, rtol=1e-5, atol=1e-6) for out, want in zip(outs, two))
            return near and bool((outs[-1] - seven).abs().max() <= 0.02 * seven.abs().max())
        return (apart(*(p.logits for p in passes)) and all(apart(*(p.before[point] for p in passes)) for point in self.points)
                and all(torch.equal(t, tried["buffers"][k]) for k, t in model["buffers"].items()))

    def mixes_samples(self, model: Model) -> bool:
        """Whether what a pass of evaluation shows of a sample depends on the others in its batch, whose statistics some layer takes."""
        self._hold(model, False)
        mixing = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and (m.training or m.running_mean is None) for m in self._modules)
        self._hold(model, True)
        return mixing

    def norm_keys(self) -> frozenset[str]:
        """Keys of normalisation layers with running statistics, found by type."""
        return frozenset(f"{n}.{k}" for n, m in self.module.named_modules() if isinstance(m, NORMS)
                         for k, t in (*m._parameters.items(), *m._buffers.items()) if t is not None and m.running_mean is not None)
