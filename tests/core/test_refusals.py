"""Early exits: what cannot work is refused when the federation is made, with what to do about it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from core_parts import Plain, federation
from torch import Tensor, nn

from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.part import Part
from consilience.core.policy import Policy
from consilience.core.task import task_named
from consilience.engines.sequential import Sequential
from consilience.errors import ConfigError, DataError, RefusedCombination
from consilience.options import option
from consilience.parts.bn import Bn
from consilience.parts.ffa import Ffa
from consilience.parts.prbm import Prbm
from consilience.parts.prox import Prox
from consilience.parts.registry import check_class
from consilience.testing import TinyNet, tiny_federation, tiny_population


class Twice(nn.Module):
    """Passes one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Linear(64, 64)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.neck(self.neck(x.flatten(1))))


class FunctionalDropout(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(x.flatten(1), 0.5, self.training))


def test_batch_of_one_with_batchnorm():
    with pytest.raises(ConfigError, match=r"'batch' option of the run must be at least 2 .*Got 1"):
        tiny_federation(batch=1)
    federation(Plain(), batch=1)                                  # without it, one sample is a batch


def test_batch_of_one_with_a_part_that_needs_more():
    @dataclass(frozen=True)
    class NeedsThree(Part):
        name, min_batch = "needs", 3
    with pytest.raises(ConfigError, match="at least 3"):
        federation(Plain(), NeedsThree(), batch=2)


def test_no_data():
    empty = replace(tiny_population(), rows=(torch.zeros(0, dtype=torch.int64),) * 2)
    with pytest.raises(DataError, match="No client has any training sample"):
        tiny_federation(population=empty)


def test_nobody_fills_a_batch():
    with pytest.raises(DataError, match=r"Every client has fewer samples than a batch of 64: the largest has 40.*last_batch=keep"):
        tiny_federation(batch=64)
    assert tiny_federation(batch=64, last_batch="keep").round().idle == []


def test_a_client_without_data_among_others_is_idle():
    population = tiny_population()
    rows = (population.rows[0], torch.zeros(0, dtype=torch.int64), *population.rows[2:])
    fed = tiny_federation(population=replace(population, rows=rows))
    assert fed.round().idle == [1, 2]


def test_cohort_too_large():
    with pytest.raises(ConfigError, match="asks for 5 clients a round, but there are 4"):
        tiny_federation(participation=5)


def test_outputs_and_classes():
    with pytest.raises(ConfigError, match="The model has 5 outputs, but the data have 3 classes"):
        federation(Plain(classes=5))


def test_a_point_that_never_fires():
    with pytest.raises(ConfigError, match=r"points unused never fire.*neck"):
        federation(Twice(), Prbm(at="unused"))


def test_a_point_that_is_no_module():
    with pytest.raises(ConfigError, match=r"no module 'nekc' for the point 'nekc'.*neck"):
        federation(Twice(), Prbm(at="nekc"))
    with pytest.raises(ConfigError, match="no module 'classifier'"):
        federation(Plain(), layout=Layout(head="classifier"))


def test_a_point_that_fires_twice():
    with pytest.raises(ConfigError, match="'neck' is passed twice in one forward pass"):
        federation(Twice(), Prbm(at="neck"))


def test_functional_dropout():
    with pytest.raises(ConfigError, match=r"FunctionalDropout draws from torch's global generator.*nn.Dropout"):
        federation(FunctionalDropout())


def test_ffa_needs_maps():
    class OneByOne(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.stage1 = nn.Sequential(nn.Conv2d(1, 64, 8))
    with pytest.raises(ConfigError, match=r"ffa needs feature maps of at least two positions.*\(64, 1, 1\)"):
        federation(OneByOne(), Ffa(), layout=Layout(stages=("stage1",)))
    with pytest.raises(ConfigError, match=r"ffa .*stage"):
        federation(TinyNet(), Ffa(), layout=Layout())


def test_fedbn_needs_batchnorm():
    with pytest.raises(ConfigError, match=r"bn needs a model with BatchNorm layers.*fedavg"):
        federation(Plain(), Bn())


def test_state_that_was_not_declared():
    @dataclass(frozen=True)
    class Undeclared(Part):
        name = "undeclared"
        reduce = {"x": "sum"}

        def finish(self, c):
            return {}, {"x": torch.ones(())}

        def server(self, s):
            return {"surprise": s.reduced["x"]}, {}
    fed = tiny_federation([Undeclared()])
    with pytest.raises(ConfigError, match=r"'server' of part 'undeclared' must return .* 'init_shared' declares: 'surprise' is none"):
        fed.round()
    assert fed.round_number == 0


def test_server_state_of_another_shape():
    @dataclass(frozen=True)
    class Grows(Part):
        name = "grows"

        def init_server(self, spec):
            return {"v": torch.zeros(2)}

        def aggregate(self, s, change):
            return change, {"v": torch.zeros(3)}
    with pytest.raises(ConfigError, match=r"'aggregate' of part 'grows' .* 'init_server' declares: 'v' has the shape \(3,\), not \(2,\)"):
        tiny_federation([Grows()]).round()


def test_an_upload_without_a_reduction():
    @dataclass(frozen=True)
    class Unreduced(Part):
        name = "unreduced"

        def finish(self, c):
            return {}, {"secret": torch.ones(())}
    with pytest.raises(ConfigError, match=r"'unreduced' uploads 'secret' but declares no reduction.*weighted"):
        tiny_federation([Unreduced()]).round()


def test_classes_that_are_no_parts():
    class NotFrozen(Part):
        name = "melting"

    @dataclass
    class Thawed(Part):
        name = "thawed"

    @dataclass(frozen=True)
    class Nameless(Part):
        pass
    for cls, words in ((NotFrozen, "frozen dataclass"), (Thawed, "frozen dataclass"), (Nameless, "has no name"), (dict, "derived from")):
        with pytest.raises(ConfigError, match=words):
            check_class(cls, "the class")
    assert check_class(Prox, "prox") is Prox


def test_an_option_with_the_name_of_a_hook():
    """It would hide the hook, and be called in the midst of a step."""
    @dataclass(frozen=True)
    class Counts(Part):
        batch: int = option(4, "samples at a time")
        name = "counts"

        def loss(self, v):
            return 0.0

    @dataclass(frozen=True)
    class Listens(Part):
        name, points = "listens", ("head",)

        def tap(self, v, point, x):
            return x

    @dataclass(frozen=True)
    class Inherits(Counts):
        name = "inherits"
    for cls, hook in ((Counts, "batch"), (Listens, "points"), (Inherits, "batch")):
        with pytest.raises(ConfigError, match=f"the class has an option or a value '{hook}', but that is the name of a hook"):
            check_class(cls, "the class")


def test_settings_out_of_range():
    with pytest.raises(ConfigError, match=r"'mu' option of prox must be at least 0.0. Got -1"):
        Prox(mu=-1)
    with pytest.raises(ConfigError, match=r"'mu' option of prox must be a number. Got 'much'"):
        Prox(mu="much")

    @dataclass(frozen=True)
    class Own(Part):
        share: str = option("a", choices=("a", "b"))
        name = "own"
    with pytest.raises(ConfigError, match="one of a, b"):
        Own(share="c")


def test_the_same_part_twice():
    with pytest.raises(RefusedCombination, match="prox and prox cannot be combined: the same part twice"):
        tiny_federation([Prox(mu=0.1), Prox(mu=0.2)])


def test_samples_of_a_proxy_of_another_shape():
    wrong = replace(tiny_population(), proxy=torch.zeros(4, 1, 5, 5))
    with pytest.raises(ConfigError, match=r"proxy data set have shape \(1, 5, 5\), those of the clients \(1, 8, 8\)"):
        tiny_federation(population=wrong)


def test_a_proxy_beside_masks():
    """Labels of the proxy's samples are nobody's; the transform is given some of the data's own shape."""
    data = tiny_population()
    masks = replace(data, y=(data.x[:, 0] > 0.5).long(), classes=2, task=task_named("segmentation"))
    net = nn.Sequential(OrderedDict(stage=nn.Conv2d(1, 4, 3, padding=1), head=nn.Conv2d(4, 2, 1)))
    fed = Federation(net, Layout(), Method([]), masks, Policy(batch=8), Sequential)
    assert fed.spec.proxy.shape == data.proxy.shape
    assert fed.round().exchanged


def test_a_part_that_prefers_what_it_has_no_say_in():
    """Else the run would train with its own learning rate, and nobody would know."""
    class Hasty(Part):
        name = "hasty"
        prefers = {"weights": "uniform", "lr": 0.1}
    with pytest.raises(ConfigError, match=r"Part 'hasty' prefers a 'lr', which nothing would come of"):
        Method([Hasty()])


def test_a_slip_in_the_name_of_an_unused_hook():
    """It would leave the hook in use without a word."""
    class Slip(Prox):
        unused = frozenset({"los"})
    with pytest.raises(ConfigError, match=r"calls 'los' unused, which is no hook\. Did you mean 'loss' or"):
        Method([Slip()])


class Forgetful(Part):
    """Declares one thing and returns another."""

    name = "forgetful"
    given: dict[str, Tensor] = {}

    def init_kept(self, spec):
        return {"sum": torch.zeros(3), "count": torch.zeros(())}

    def finish(self, c):
        return self.given, {}


class Wandering(Part):
    name = "wandering"

    def init_scratch(self, c):
        return {"last": torch.zeros(3)}

    def track(self, v):
        return {"lost": torch.zeros(3)}


@pytest.mark.parametrize(("given", "said"), [
    ({"sum": torch.zeros(3)}, "'count' is missing"),
    ({"sum": torch.zeros(4), "count": torch.zeros(())}, r"'sum' has the shape \(4,\), not \(3,\)"),
    ({"sum": torch.zeros(3), "count": torch.zeros(()), "more": {"x": torch.zeros(1)}}, "'more/x' is none of them"),
])
def test_what_a_client_keeps_is_what_was_declared(given, said, monkeypatch):
    monkeypatch.setattr(Forgetful, "given", given)
    with pytest.raises(ConfigError, match=f"'finish' of part 'forgetful' must return the tensors that 'init_kept' declares: {said}"):
        tiny_federation([Forgetful()]).round()


def test_what_a_step_tracks_is_what_was_declared():
    with pytest.raises(ConfigError, match=r"'track' of part 'wandering' .* declares: 'last' is missing; 'lost' is none of them"):
        tiny_federation([Wandering()]).round()
