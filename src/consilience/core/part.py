"""The vocabulary of methods: Part and its hooks, Phase, Spec, Batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from .. import rng
from ..options import check
from ..tree import Flat, Tree
from .correction import Correction
from .layout import Layout
from .policy import Policy

if TYPE_CHECKING:
    from .client import ClientView
    from .server import ServerView
    from .step_view import StepView

Model = dict[str, Flat]                     # {"params": …, "buffers": …}


@dataclass(frozen=True)
class Phase:
    """Which keys of which model train, and for how long. `model` is "model", or the part that owns a second one.

    `epochs` of None means the run's own amount of local work (its epochs or its steps).
    """

    name: str
    keys: tuple[str, ...]
    model: str = "model"
    epochs: int | None = None


@dataclass(frozen=True)
class Spec:
    """What parts may know when they declare state."""

    layout: Layout
    policy: Policy
    model: Model                            # initial values; in `build`, those of the model given
    norm: frozenset[str]                    # keys of normalisation layers with running statistics, found by type
    shapes: Mapping[str, tuple[int, ...]]   # point -> shape without the batch
    sample: tuple[int, ...]                 # shape of one transformed input
    classes: int
    population: int
    proxy: Tensor | None = None             # public samples, transformed, where the run names a proxy data set
    tokens: bool = False                    # samples are whole numbers, as the words of a text: nothing can be averaged or mixed
    shared: frozenset[str] = frozenset()    # keys that travel
    trained: tuple[str, ...] = ()           # parameters that travel and that some phase trains
    output: tuple[int, ...] = ()            # shape of one sample's logits: classes, and the positions of a mask

    @property
    def features(self) -> str:
        return self.layout.features

    @property
    def width(self) -> int:
        """Size of the feature vector that enters the head."""
        return self.shapes[self.features][0]

    def in_head(self, key: str) -> bool:
        return self.layout.region(key) == "head"

    def key(self, *words: str | int) -> Tensor:
        """A key for values drawn when state is declared."""
        return rng.key(self.policy.seed, "declare", *words)


class Batch(NamedTuple):
    x: Tensor
    y: Tensor        # labels of the drawn samples
    target: Tensor   # what the loss compares with: y, or class probabilities


class Part:
    """One idea. Fields are its settings; hooks are pure. A hook that is not overridden is never called.

    c: ClientView (outside steps)    v: StepView (inside a step)    s: ServerView    spec: Spec
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""                            # where the idea was published, with the equation
    helps: ClassVar[tuple[str, ...]] = ()                # the kinds of skew it was made against
    departs: ClassVar[tuple[str, ...]] = ()              # where we depart from paper or release, and the option that returns
    neutral: ClassVar[Mapping[str, Any] | None] = None   # settings at which FedAvg comes out bit for bit
    not_neutral: ClassVar[str] = ""                      # … or why there are none
    trial: ClassVar[Mapping[str, Any]] = {}              # settings that make a short trial meaningful and quick

    rank: ClassVar[int] = 50              # order of every fold: lower first, then by name
    acts_on: ClassVar[str] = "model"      # the model whose phases call this part's step hooks
    previous: ClassVar[bool] = False      # asks for v.previous, the client's last trained model
    teachers: ClassVar[tuple[str, ...]] = ()   # of "received" and "previous": what it asks for v.forward(…, v.batch.x) in every step
    reserve: ClassVar[float] = 0.0        # share of a client's training samples held back
    only_in_training: ClassVar[bool] = False   # its personal tensors act in training alone: nobody is served by a model of its own for them
    scored: ClassVar[str] = ""            # when a client's own model is scored, where it is not right after aggregation
    pools: ClassVar[bool] = False         # train one model on all clients' samples together
    reads_models: ClassVar[bool] = False  # its server hooks look at single clients' models (s.models)
    needs_vectors: ClassVar[bool] = False # works on one feature vector and one label per sample, not on maps and masks
    in_every_pass: ClassVar[bool] = False # its tap belongs to the model: it acts in every pass of every model, on shared state alone
    narrow_maps: ClassVar[bool] = False   # its tap takes maps in bfloat16 where the run computes so; others get them in float32
    min_batch: ClassVar[int] = 1          # smallest batch its step hooks can work with
    reduce: ClassVar[Mapping[str, str]] = {}   # upload -> "weighted" | "mean" | "sum" | "stack" | "concat"
    prefers: ClassVar[Mapping[str, str]] = {}  # {"weights": …} of the average it was published with, for runs that leave them open

    def __post_init__(self) -> None:
        check(self, self.name)

    @property
    def at_neutral(self) -> bool:
        """Whether its settings are those at which it is FedAvg."""
        return bool(self.neutral) and all(getattr(self, key) == value for key, value in (self.neutral or {}).items())

    # what it can stand beside, and what it says of itself: properties where that depends on settings
    @property
    def claims(self) -> Mapping[str, str]:
        """What it alone may own -> why."""
        return {}

    @property
    def traits(self) -> frozenset[str]:
        """What it is, for others to refuse."""
        return frozenset()

    @property
    def refuses(self) -> Mapping[str, str]:
        """Traits of others that it cannot stand beside -> why."""
        return {}

    def objection(self, other: Part) -> str | None:
        """Why it cannot stand beside another part, where that follows from what the other does rather than from its traits."""
        return None

    @property
    def uploads(self) -> Mapping[str, str]:
        """What it uploads with its settings, and how each is reduced: `reduce`, or a part of it."""
        return self.reduce

    @property
    def unused(self) -> frozenset[str]:
        """Hooks that have nothing to do with its settings, and so are not called: `prepare` alone would send every client the model."""
        return frozenset()

    @property
    def skips_exchanges(self) -> bool:
        """Whether `exchange` says no to some rounds."""
        return type(self).exchange is not Part.exchange and "exchange" not in self.unused

    @property
    def surveys_previous(self) -> bool:
        """Whether `survey` asks the clients of the round before, not those of the coming one."""
        return False

    @property
    def second_order(self) -> bool:
        """Whether its steps take gradients of gradients, which most kernels of ours do not have: PyTorch's own operations then train."""
        return False

    @property
    def pieces(self) -> int:
        """Into how many pieces it cuts a batch, each of which must be large enough for the model and all parts."""
        return 1

    @property
    def begins(self) -> int:
        """The first round in which it acts; a run that ends before is warned of."""
        return 1

    @property
    def privacy(self) -> str:
        """What its settings protect, from whom, and what they do not; empty for parts that protect nothing."""
        return ""

    @property
    def raw_averages(self) -> str:
        """Which averages of raw samples leave a client; empty where none do. A federation must allow them explicitly."""
        return ""

    def caution(self, spec: Spec) -> str | None:
        """What a user should know before the first round, as the rest of a sentence that begins with the part's name."""
        return None

    # once, when the method is built
    def require(self, spec: Spec) -> str | None:
        """Why it cannot run on these data, this model or this policy; None where it can."""
        return None

    def build(self, module: nn.Module, spec: Spec) -> nn.Module:
        """The module with what it attaches or replaces; what it attaches under its own name is its own."""
        return module

    def points(self, layout: Layout) -> tuple[str, ...]:
        """Where in the model it listens or acts: names of modules, `name:input` for what enters one."""
        return ()

    def share(self, key: str, spec: Spec) -> bool:
        """Whether this parameter or buffer travels."""
        return True

    def phases(self, phases: list[Phase], spec: Spec) -> list[Phase]:
        """What trains, one after another, in a round of a client."""
        return phases

    def plain_keys(self, keys: tuple[str, ...], spec: Spec) -> tuple[str, ...]:
        """What `c.train` trains."""
        return keys

    def init_shared(self, spec: Spec) -> Tree:
        """State on the server that is sent to every client, as it is before the first round."""
        return {}

    def init_server(self, spec: Spec) -> Tree:
        """State on the server that is never sent."""
        return {}

    def init_kept(self, spec: Spec) -> Tree:
        """State that a client keeps between its rounds."""
        return {}

    def init_personal(self, spec: Spec) -> Tree:
        """Tensors of a client that train with its model and never leave it."""
        return {}

    def exchange(self, round_number: int) -> bool:
        """Whether models travel in this round."""
        return True

    # on a client, around its steps
    def prepare(self, c: ClientView) -> Tree:
        """What a client uploads before the first round."""
        return {}

    def survey(self, c: ClientView) -> Tree:
        """What a client uploads in a round before it trains, of the model as received."""
        return {}

    def receive(self, c: ClientView) -> tuple[Flat, Tree]:
        """The parameters that training starts from, and scratch."""
        return c.received["params"], {}

    def init_scratch(self, c: ClientView) -> Tree:
        """State for one round of a client."""
        return {}

    def plan(self, key: Tensor, spec: Spec, sizes: Tensor) -> Tree:
        """Draws for all steps of a round, a row for each; `sizes` are those of their batches."""
        return {}

    def finish(self, c: ClientView) -> tuple[Tree, Tree]:
        """After training: what the client keeps, and what it uploads."""
        return c.kept, {}

    def release(self, c: ClientView, uploads: dict[str, Tree], model: Model) -> tuple[dict[str, Tree], Model]:
        """What leaves the client, of what all parts upload and of the model."""
        return uploads, model

    def personalise(self, c: ClientView) -> tuple[Model, bool]:
        """The client's own model for scoring, and whether taps act in it."""
        return c.received, True

    # inside a step
    def batch(self, v: StepView) -> Batch:
        """The batch that the step trains on, in place of `v.batch`."""
        return v.batch

    def beside(self, v: StepView) -> Tensor | None:
        """Samples that `v.forward(v.model, …)` will be asked for, to go through the main pass with the batch."""
        return None

    def tap(self, v: StepView, point: str, x: Tensor) -> Any:
        """The value at a point in place of x; or that and a note for `v.notes`."""
        return x

    def relabel(self, v: StepView) -> Tensor:
        """What the loss compares with, in place of the target."""
        return v.batch.target

    def track(self, v: StepView) -> Tree:
        """Scratch after the main pass."""
        return v.scratch

    def before(self, v: StepView) -> Any:
        """A loss for a step of its own tensors before the main pass."""
        return 0.0

    def adversary(self, v: StepView) -> Any:
        """A loss for a step of its own tensors after the main pass."""
        return 0.0

    def main_loss(self, v: StepView) -> Any:
        """The loss in place of the task's."""
        return 0.0

    def loss(self, v: StepView) -> Any:
        """A term that is added to the loss."""
        return 0.0

    def correction(self, v: StepView) -> Correction:
        """What is added to every gradient: a constant, and a pull of the parameters to others."""
        return Correction()

    def gradient(self, v: StepView, grad_at: Callable[..., Flat]) -> Flat | tuple[Flat, Tree]:
        """The gradient in place of that of the loss, and scratch where it has any; ask `grad_at(params, batch=None)` where you like."""
        return grad_at(v.params)

    def grad(self, v: StepView, g: Flat) -> Flat:
        """The gradient, changed."""
        return g

    # on the server
    def choose(self, s: ServerView, drawn: list[int]) -> list[int]:
        """The clients of the coming round: of `s.ids`, and no more than the run drew. Not asked where all take part."""
        return drawn

    def server(self, s: ServerView) -> tuple[Tree, Tree]:
        """After the uploads were put together: what is shared from now on, and server state."""
        return s.shared, s.server

    def weights(self, s: ServerView, p: Tensor) -> Tensor:
        """The clients' weights in the average, which come as `p`."""
        return p

    def aggregate(self, s: ServerView, change: Flat) -> tuple[Flat, Tree]:
        """The change of the model, and server state."""
        return change, s.server

    def deliver(self, s: ServerView, client: int) -> Tree:
        """What this client alone is sent."""
        return {}

    def publish(self, s: ServerView, owner: str, reduced: Tree, how: Mapping[str, str]) -> Tree:
        """What is made known of what clients uploaded, once it was put together."""
        return reduced

    def account(self, s: ServerView, releases: Mapping[str, list[int]]) -> tuple[dict[str, Any], Tree]:
        """After a round: an entry of its record, and server state. `releases` says who uploaded what."""
        return {}, s.server


HOOKS = ("require", "build", "points", "share", "phases", "plain_keys", "init_shared", "init_server", "init_kept", "init_personal",
         "exchange", "prepare", "survey", "receive", "init_scratch", "plan", "finish", "release", "personalise",
         "batch", "beside", "tap", "relabel", "track", "before", "adversary", "main_loss", "loss", "correction", "gradient", "grad",
         "choose", "server", "weights", "aggregate", "deliver", "publish", "account")
TASK_HOOKS = ("batch", "main_loss")                  # define the task: act in every phase
# act on the part's own model
STEP_HOOKS = ("beside", "tap", "relabel", "track", "before", "adversary", "loss", "correction", "gradient", "grad")
OWN_STEPS = ("before", "adversary")                  # descend a loss of the part's own
EXCLUSIVE = ("relabel", "main_loss", "gradient", "receive", "personalise", "release", "choose")      # only one part may define them
