"""Frozen models are asked once a round what they make of a client's samples, where the answer cannot change meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilience import tree
from consilience.core import federation, recall
from consilience.core.federation import Federation
from consilience.core.layout import Layout
from consilience.core.method import Method
from consilience.core.network import Trace
from consilience.core.part import Batch, Model, Part
from consilience.core.policy import Policy
from consilience.core.population import Population
from consilience.core.recall import bytes_of, recalled_models
from consilience.core.step import Step
from consilience.core.step_view import StepView
from consilience.engines.rehearse import work_of
from consilience.engines.sequential import Sequential
from consilience.errors import ConfigError
from consilience.parts import parse_stack
from consilience.testing import LAYOUT, TinyNet, largest_difference, run_tiny, tiny_federation, tiny_population

BOTH = ("received", "previous")


def parts_of(stack: str) -> tuple[Part, ...]:
    return parse_stack(stack).method().parts


def test_rows_of_the_batch_are_looked_up() -> None:
    """Three samples in the client's order, of which a step has drawn the third and the first."""
    answers = {"logits": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "head:input": torch.tensor([[7.0], [8.0], [9.0]])}
    trace = recall.trace_of(answers, torch.tensor([2, 0]))
    assert trace.logits.tolist() == [[5.0, 6.0], [1.0, 2.0]]
    assert trace.before["head:input"].tolist() == trace.after["head:input"].tolist() == [[9.0], [7.0]]


def test_bytes_by_hand() -> None:
    """Clients of 25, 17 and 9 samples; TinyNet shows what enters its head and 3 logits, in float32, for each of the two models."""
    fed = tiny_federation(parts_of("moon"), sizes=(25, 17, 9))
    assert bytes_of(fed) == 2 * 25 * (fed.spec.width + 3) * 4
    assert bytes_of(tiny_federation(sizes=(25, 17, 9))) == 0


@pytest.mark.parametrize("stack", ["moon", "lfd", "fedntd", "moon+fedntd+scaffold", "fedsam+moon", "fedper+moon"])
@pytest.mark.parametrize("how", [{}, {"last_batch": "keep"}, {"sampling": "replacement", "epochs": 3}])
def test_every_answer_is_what_a_pass_over_the_batch_shows(stack: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In clients of different sizes, also in batches that are not full; and so the result is what passes in every step give."""
    met, real = set(), Step.recalled

    def compared(step: Step, model: Model, x: Tensor) -> Trace | None:
        trace = real(step, model, x)
        assert trace is not None
        met.add((len(x), next(name for name in BOTH if getattr(step.slot, name) is model)))
        want = step.program.network.forward(model, x)
        torch.testing.assert_close(trace.logits, want.logits, rtol=1e-5, atol=1e-6)
        assert trace.before.keys() == want.before.keys() != set()
        for point in want.before:
            torch.testing.assert_close(trace.before[point], want.before[point], rtol=1e-5, atol=1e-6)
        return trace
    monkeypatch.setattr(Step, "recalled", compared)
    settings = {"sizes": (26, 19, 12), **how}
    ours = run_tiny(parts_of(stack), **settings)
    assert {name for _, name in met} == set(ours.recalled) != set()
    assert len({size for size, _ in met}) == (4 if how == {"last_batch": "keep"} else 1)
    monkeypatch.setattr(Step, "recalled", real)
    monkeypatch.setattr(federation, "recalled_models", lambda fed: ())
    # Processors add up batches of other sizes in other orders: up to 3e-5 was seen. One row in another's place makes 0.05 or more.
    assert largest_difference(ours, run_tiny(parts_of(stack), **settings)) < 2e-4


def test_models_are_those_of_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the round before would be of another model: the received one changes from round to round."""
    asked: list[dict[str, Any]] = []
    real = recall.answers

    def noted(fed: Federation, number: int, models: dict[str, Model]) -> Any:
        asked.append(tree.clone(models))
        return real(fed, number, models)
    monkeypatch.setattr("consilience.core.client.answers", noted)
    fed = tiny_federation(parts_of("moon"), sizes=(24, 16))
    for _ in range(2):
        sent = tree.clone(fed.model)
        asked.clear()
        fed.round()
        assert len(asked) == fed.size
        for models in asked:
            assert all(torch.equal(a, b) for a, b in tree.matched(models["received"], sent))


class Asking(Part):
    """Asks and adds nothing."""

    name, teachers = "asking", ("received",)

    def loss(self, v: StepView) -> Any:
        return 0.0 * v.forward(v.received, v.batch.x).logits.sum()


class Silent(Asking):
    name, teachers = "silent", ()


class Deep(Asking):
    """Listens to maps."""

    name = "deep"

    def points(self, layout: Layout) -> tuple[str, ...]:
        return layout.stages


class Brighter(Part):
    """Trains on other samples than were drawn."""

    name = "brighter"

    def batch(self, v: StepView) -> Batch:
        return v.batch._replace(x=v.batch.x + 1)


class Tapping(Part):
    """A tap that belongs to the model."""

    name, in_every_pass = "tapping", True

    def points(self, layout: Layout) -> tuple[str, ...]:
        return (layout.features,)

    def tap(self, v: StepView, point: str, x: Tensor) -> Tensor:
        return 2 * x


def test_who_asks_is_answered_from_memory() -> None:
    fed = tiny_federation([Asking()])
    assert fed.recalled == ("received",)
    assert tiny_federation(parts_of("lfd")).recalled == BOTH


def somebodys(x: Tensor, y: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
    """A transform that does not say that it draws nothing."""
    return x.float(), y


def augmented() -> Population:
    plain = tiny_population()
    return Population(plain.x, plain.y, plain.rows, plain.classes, somebodys)


@pytest.mark.parametrize(("parts", "how"), [
    ((), {}), ((Silent(),), {}), ((Deep(),), {}), ((Asking(), Brighter()), {}), ((Asking(), Tapping()), {}),
    ((Asking(),), {"epochs": 1}), ((Asking(),), {"steps": 50}),
    ((Asking(),), {"population": augmented()}),
], ids=["nobody asks", "without a word of it", "maps", "other samples", "a tap of the model", "one epoch", "steps", "augmentation"])
def test_elsewhere_models_are_asked_in_every_step(parts: tuple[Part, ...], how: dict[str, Any]) -> None:
    fed = run_tiny(parts, rounds=1, **how)
    assert fed.recalled == ()
    assert fed.make_slot(work_of(fed, 0)).samples == 0


def test_answers_that_are_wide_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fed = tiny_federation([Asking()])
    shown = fed.spec.width + 3
    for widest, kept in ((shown, ("received",)), (shown - 1, ())):
        monkeypatch.setattr(recall, "WIDEST", widest)
        assert recalled_models(fed) == kept


class OfTheBatch(TinyNet):
    """Statistics are those of the batch at hand, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.neck[2] = nn.BatchNorm1d(12, track_running_stats=False)


class NeverEvaluated(TinyNet):
    """The same by a way of its own."""

    def train(self, mode: bool = True) -> NeverEvaluated:
        super().train(mode)
        self.neck[2].train()
        return self


class Frozen(TinyNet):
    """Normalisation layers that stay as they were given: in training too their statistics are of no batch."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.neck[2].eval()
        return self


class ShowsMoreInTraining(TinyNet):
    """Passes a module, which shows one number a sample, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Flatten(0)

    def forward(self, x: Tensor) -> Tensor:
        features = self.header(self.neck(self.stage1(x)))
        if self.training:
            self.beside(features[:, :1])
        return self.head(features)


class AtItsModule(Asking):
    """Asks for what entered the head alone."""

    name = "at_its_module"

    def points(self, layout: Layout) -> tuple[str, ...]:
        return ("beside",)

    def loss(self, v: StepView) -> Any:
        trace = v.forward(v.received, v.batch.x)
        assert "beside" not in trace.before
        assert trace.buffers.keys() == v.received["buffers"].keys() != set()
        return 0.0 * trace.before[v.spec.features].sum()


def federation_of(module: nn.Module, part: Part) -> Federation:
    return Federation(module, LAYOUT, Method([part]), tiny_population(), Policy(lr=0.05, batch=8, epochs=2), Sequential)


@pytest.mark.parametrize(("module", "kept"), [(TinyNet, True), (OfTheBatch, False), (NeverEvaluated, False), (Frozen, True)])
def test_models_whose_answers_depend_on_the_batch_are_asked_in_every_step(module: type[nn.Module], kept: bool) -> None:
    assert federation_of(module(), Asking()).recalled == (("received",) if kept else ())


def test_an_answer_is_a_pass_of_evaluation_in_all_it_shows() -> None:
    """Points of that pass alone, also where one shows a number and no vector; and the model's buffers."""
    fed = federation_of(ShowsMoreInTraining(), AtItsModule())
    assert fed.recalled == ("received",)
    assert fed.spec.shapes["beside"] == ()
    fed.round()


def test_a_site_by_itself_does_what_the_simulation_does_for_it() -> None:
    """15 samples in batches of 8, two epochs: it sees hardly more than one of them. The largest client is not to decide for it."""
    assert {tiny_federation([Asking()], sizes=sizes).recalled for sizes in ((15,), (15, 400), (8, 9))} == {("received",)}


def test_pieces_of_a_batch_are_asked_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per-FedAvg takes gradients over pieces of a batch: nothing would look up the rows of the whole, so they are not asked for."""
    stack = "perfedavg+fedntd"
    ours, plain = run_tiny(parts_of(stack)), run_tiny(parts_of("perfedavg(alpha=0)+fedntd"))
    assert ours.recalled == ()
    assert plain.recalled == ("received",)                       # without its inner step it cuts no batch
    monkeypatch.setattr(federation, "recalled_models", lambda fed: ("received",))
    assert largest_difference(ours, run_tiny(parts_of(stack))) == 0


@pytest.mark.parametrize(("teachers", "said"), [(("recieved",), "can be received and previous. Got recieved instead"),
                                                (("previous",), "must say previous = True as well")])
def test_teachers_that_are_not_there(teachers: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asking, "teachers", teachers)
    with pytest.raises(ConfigError, match=said):
        tiny_federation([Asking()])
