"""The probe: points of any module, layouts that do not fit, and draws that cannot be keyed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from consilience.core.layout import Layout
from consilience.errors import ConfigError
from consilience.models import check_layout, describe_points
from consilience.models.droppath import DropPath


class Net(nn.Module):
    """conv (maps) → flatten → [middle] → classifier; `relu` runs twice, `spare` never."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.relu = nn.ReLU()
        self.middle = middle or nn.Identity()
        self.classifier = nn.Linear(8, 3)
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        x = self.relu(self.norm(self.conv(x)))
        return self.classifier(self.middle(self.relu(x.flatten(1))))


SAMPLE = (1, 4, 4)


def test_points_with_and_without_a_sample():
    plain = {p.name: p for p in describe_points(Net())}
    assert plain["conv"] == ("conv", "Conv2d", 20, None, None)              # 2·9 weights and 2 biases
    seen = {p.name: (p.fires, p.shape) for p in describe_points(Net(), SAMPLE)}
    assert seen == {"conv": (1, (2, 2, 2)), "norm": (1, (2, 2, 2)), "relu": (2, (2, 2, 2)), "middle": (1, (8,)),
                    "classifier": (1, (3,)), "spare": (0, None)}


def test_a_layout_that_fits_gives_shapes_in_the_order_of_the_pass():
    shapes = check_layout(Net(), Layout(head="classifier", stages=("norm",), extractor=("conv", "norm")), SAMPLE)
    assert list(shapes.items()) == [("conv", (2, 2, 2)), ("norm", (2, 2, 2)), ("classifier", (3,)), ("classifier:input", (8,))]


@pytest.mark.parametrize(("layout", "words"), [
    (Layout(head="clasifier"), ["'clasifier'", "the head", "Did you mean 'classifier'"]),
    (Layout(head="spare"), ["'spare'", "never runs", "classifier"]),
    (Layout(head="classifier", stages=("relu",)), ["'relu'", "a stage", "runs 2 times"]),
    (Layout(head="classifier", stages=("middle",)), ["'middle'", "(8,)", "maps"]),
    (Layout(head="classifier", extractor=("norm", "conv")), ["order", "conv, norm, classifier"]),
    (Layout(head="conv", header=("middle",)), ["order", "conv, middle"]),
])
def test_a_layout_that_does_not_fit_is_refused(layout, words):
    with pytest.raises(ConfigError) as error:
        check_layout(Net(), layout, SAMPLE)
    assert all(word in str(error.value) for word in words), str(error.value)


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class Noise(Net):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


@pytest.mark.parametrize("middle", [nn.Dropout(0.5), DropPath(0.5), nn.Sequential(nn.Dropout(0.2), nn.Dropout(0.3, inplace=True))])
def test_dropout_layers_can_be_keyed(middle):
    check_layout(Net(middle), Layout(head="classifier"), SAMPLE)


@pytest.mark.parametrize(("module", "where"), [
    (Net(nn.Sequential(nn.Identity(), FunctionalDropout())), "'middle.1'"),
    (Net(nn.AlphaDropout(0.5)), "'middle'"),
    (Net(nn.RReLU()), "'middle'"),
    (Noise(), "its own forward"),
])
def test_draws_that_cannot_be_keyed_are_refused_by_name(module, where):
    with pytest.raises(ConfigError, match="global generator") as error:
        check_layout(module, Layout(head="classifier"), SAMPLE)
    assert where in str(error.value)


def test_the_probe_leaves_no_trace():
    module = Net(nn.Dropout(0.5)).eval()
    state = {k: v.clone() for k, v in module.state_dict().items()}
    generator = torch.get_rng_state()
    check_layout(module, Layout(head="classifier"), torch.ones(4, *SAMPLE))
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_a_model_that_fails_or_gives_no_tensor_is_said():
    with pytest.raises(ConfigError, match=r"fails on a batch of shape \(2, 1, 9, 9\)"):
        check_layout(Net(), Layout(head="classifier"), (1, 9, 9))

    class Several(Net):
        def forward(self, x):
            return {"logits": super().forward(x)}

    with pytest.raises(ConfigError, match="one tensor"):
        check_layout(Several(), Layout(head="classifier"), SAMPLE)


def test_drop_path_tosses_one_coin_per_sample_and_keeps_the_mean():
    x = torch.ones(2000, 3, 2)
    torch.manual_seed(0)
    out = DropPath(0.25).train()(x)
    per_sample = out.flatten(1)
    assert per_sample.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert torch.equal(per_sample.amax(1), per_sample.amin(1))              # a sample is dropped whole or not at all
    # 2000 coins: the kept share has standard deviation √(.25·.75/2000) = 0.0097; four of them are 0.039
    assert (per_sample[:, 0] > 0).float().mean().item() == pytest.approx(0.75, abs=0.039)
    assert torch.equal(DropPath(0.25).eval()(x), x)
