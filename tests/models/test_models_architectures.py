"""Every architecture: parameter counts of METHODS.md, shapes at the papers' sizes, passes, names, initial values."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from consilience import rng
from consilience.core.network import Network
from consilience.errors import ConfigError
from consilience.models import MODELS, Built, check_layout, default_for, make

KEY = rng.key(0, "model")
SMALL = {"alexnet_bn": (3, 96, 96), "unet": (3, 32, 32)}       # the papers' sizes are slow on a CPU


def build(text: str, sample: tuple[int, ...] | None = None, classes: int | None = None, vocabulary: int | None = None,
          key: torch.Tensor = KEY) -> Built:
    family = MODELS[text.partition("(")[0]]
    return make(text, sample=sample or family.example[0], classes=classes or family.example[1], key=key,
                vocabulary=vocabulary or family.vocabulary)


def batch(name: str, size: int, sample: tuple[int, ...] | None = None) -> torch.Tensor:
    shape = (size, *(sample or SMALL.get(name, MODELS[name].example[0])))
    if MODELS[name].vocabulary:
        return torch.arange(torch.Size(shape).numel()).reshape(shape) % MODELS[name].vocabulary
    return rng.normal(rng.key(1, "batch"), shape)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def shapes(text: str, sample: tuple[int, ...], classes: int = 10) -> dict[str, tuple[int, ...]]:
    built = build(text, sample, classes)
    return check_layout(built.module.to("meta"), built.layout, torch.empty(2, *sample, device="meta"))


@pytest.mark.parametrize(("text", "sample", "classes", "expected"), [
    ("mnist_cnn", (1, 28, 28), 10, 371_850),            # METHODS §1.6
    ("vgg11", (3, 32, 32), 10, 9_225_610),
    ("cct", (3, 32, 32), 100, 3_783_269),               # §9
    ("moon_cnn", (3, 32, 32), 10, 92_626),
    ("resnet18", (3, 32, 32), 10, 11_181_642),
    ("resnet18(stem='3x3')", (3, 32, 32), 10, 11_173_962),
    ("resnet50", (3, 32, 32), 100, 23_712_932),
    ("resnet50(stem='3x3')", (3, 32, 32), 100, 23_705_252),
    ("fedavg_cnn", (1, 28, 28), 10, 582_026),           # §5.6
    ("fedavg_cnn", (3, 32, 32), 100, 924_708),
    ("fedavg_cnn", (3, 64, 64), 200, 5_694_600),
    ("alexnet_bn", (3, 256, 256), 10, 12_974_154),
    ("unet", (3, 384, 384), 2, 7_763_074),
    ("har_cnn", (9, 1, 128), 6, 2_253_958),
    ("har_cnn(head_kind='linear')", (9, 1, 128), 6, 2_253_958),
    ("lenet5", (1, 28, 28), 10, 61_706),                # the well-known count: 156 + 2416 + 48120 + 10164 + 850
    ("mlp", (1, 28, 28), 10, 199_210),                  # McMahan et al. 2017 print this number for the 2NN
    # pfl-research: (27 + 1)·32 | (288 + 1)·64 | (14·14·64 + 1)·128 | (128 + 1)·10; its maps are 32 → 30 → 28 → 14 wide
    ("pfl_cnn", (3, 32, 32), 10, 896 + 18_496 + 1_605_760 + 1_290),
    # fastText: 98635·32 + (32·32 + 32) + (32·4 + 4)
    ("fasttext", (200,), 4, 3_157_508),
    # digits: 16·9 + 16 + 32 | 32·16·9 + 32 + 64 | 128·64 + 64 | 64·64 + 64 + 64·32 + 32 | 32·10 + 10
    ("digits_cnn", (1, 8, 8), 10, 192 + 4704 + 8256 + 6240 + 330),
])
def test_parameter_counts(text, sample, classes, expected):
    assert count(build(text, sample, classes).module) == expected


def test_a_file_is_named_as_its_model():
    assert {name: family.__module__.rpartition(".")[2] for name, family in MODELS.items()} == {name: name for name in MODELS}


def test_a_groupnorm_resnet_has_as_many_parameters_and_no_batchnorm():
    module = build("resnet18(stem='3x3', norm='group')").module
    groups = [m for m in module.modules() if isinstance(m, nn.GroupNorm)]
    assert count(module) == 11_173_962
    assert len(groups) == 20
    assert {g.num_groups for g in groups} == {2}
    assert not list(module.buffers())


def test_cct_14_has_20_84_million():
    assert round(count(build("cct(layers=14, width=384, heads=6, ratio=3)").module) / 1e6, 2) == 20.84


@pytest.mark.parametrize(("text", "expected"), [
    # the projection d → 2p → 2p → p adds 2pd + 2p + 4p² + 2p + 2p² + p; the head then has p·10 + 10
    ("mnist_cnn(project=128)", 371_850 + 256 * 128 + 256 + 256 * 256 + 256 + 256 * 128 + 128),
    ("vgg11(project=512)", 9_225_610 + 512 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 512 + 512),
    ("vgg11(project=128)", 9_225_610 - 5130 + 1290 + 512 * 256 + 256 + 256 * 256 + 256 + 256 * 128 + 128),
])
def test_a_projection_in_the_extractor(text, expected):
    built = build(text)
    assert count(built.module) == expected
    assert built.layout.extractor[-1] == "project"
    assert built.layout.features == "head:input"


def test_points_of_the_four_layer_cnn_at_64_pixels():
    s = shapes("fedavg_cnn", (3, 64, 64), 200)
    sizes = [torch.Size(s[p]).numel() for p in ("stage1", "stage2", "neck", "head:input", "head")]
    assert sizes == [28_800, 10_816, 512, 512, 200]     # DBE's Table 1


@pytest.mark.parametrize(("side", "flat"), [(28, 1024), (32, 1600), (64, 10_816)])
def test_the_four_layer_cnn_flattens_to_the_published_sizes(side, flat):
    assert build("fedavg_cnn", (3, side, side)).module.neck[1].in_features == flat


def test_points_of_resnet18_at_64_pixels():
    s = shapes("resnet18", (3, 64, 64), 200)
    assert s["stem"] == (64, 16, 16)                    # after the pool; 16,384 in DBE's Table 7
    assert [s[f"layer{i}"] for i in (1, 2, 3, 4)] == [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2)]
    assert s["head:input"] == (512,)


def test_the_cifar_stem_keeps_the_size():
    assert shapes("resnet18(stem='3x3')", (3, 32, 32))["stem"] == (64, 32, 32)


def test_ffa_points_of_alexnet_and_unet():
    alexnet, unet = build("alexnet_bn"), build("unet")
    s = check_layout(alexnet.module.to("meta"), alexnet.layout, torch.empty(2, 3, 256, 256, device="meta"))
    assert [s[p] for p in alexnet.layout.stages] == [(64, 31, 31), (192, 15, 15), (384, 15, 15), (256, 15, 15), (256, 7, 7)]
    s = check_layout(unet.module.to("meta"), unet.layout, torch.empty(2, 3, 384, 384, device="meta"))
    assert [s[p] for p in unet.layout.stages] == [(32, 192, 192), (64, 96, 96), (128, 48, 48), (256, 24, 24), (512, 24, 24)]
    assert s["head"] == (2, 384, 384)


def test_points_of_the_other_papers_models():
    assert shapes("moon_cnn", (3, 32, 32))["neck"] == (84,)
    assert shapes("moon_cnn", (3, 32, 32))["head:input"] == (256,)
    assert build("moon_cnn").layout.extracted == "neck"
    assert shapes("har_cnn", (9, 1, 128), 6)["head:input"] == (1664,)
    assert shapes("har_cnn(head_kind='linear')", (9, 1, 128), 6)["head:input"] == (512,)
    assert shapes("cct", (3, 32, 32), 100)["tokens"] == (256, 256)
    assert shapes("mnist_cnn", (1, 28, 28))["stage4"] == (128, 14, 14)
    assert shapes("digits_cnn", (1, 8, 8)) == {"stage1": (16, 4, 4), "stage2": (32, 2, 2), "neck": (64,), "header": (32,),
                                               "head": (10,), "head:input": (32,)}


def test_stages_that_give_one_position_are_no_stages():
    assert build("vgg11", (3, 32, 32)).layout.stages == ("stage1", "stage2", "stage3", "stage4")       # stage5 gives 1×1
    assert build("vgg11", (3, 64, 64)).layout.stages[-1] == "stage5"
    assert build("resnet18", (3, 32, 32)).layout.stages == ("stem", "layer1", "layer2", "layer3")      # 7×7 stem: layer4 gives 1×1


@pytest.mark.parametrize("name", MODELS)
def test_trains_on_two_and_scores_one(name):
    sample = SMALL.get(name, MODELS[name].example[0])
    module = build(name, sample).module
    classes = MODELS[name].example[1]
    out = module.train()(batch(name, 2))
    assert out.shape[:2] == (2, classes)
    assert out.dtype == torch.float32
    out.square().sum().backward()
    assert [n for n, p in module.named_parameters() if p.grad is None] == []
    one = module.eval()(batch(name, 1))
    assert one.shape == (1, *out.shape[1:])
    assert one.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_a_row_does_not_depend_on_its_neighbours_in_eval_mode(name):
    module = build(name, SMALL.get(name)).module.eval()
    x = batch(name, 3)
    with torch.no_grad():
        assert torch.allclose(module(x)[1:2], module(x[1:2]), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_initial_values_come_from_the_key_alone(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(name, SMALL.get(name)).module.state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    again = build(name, SMALL.get(name)).module.state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    other = build(name, SMALL.get(name), key=rng.key(1, "model")).module.state_dict()
    assert not torch.equal(first["head.0.weight" if "head.0.weight" in first else "head.weight"],
                           other["head.0.weight" if "head.0.weight" in other else "head.weight"])


@pytest.mark.parametrize("name", MODELS)
def test_every_named_module_fires_once_in_order_and_the_head_is_last(name):
    built = build(name, SMALL.get(name))
    seen = check_layout(built.module, built.layout, batch(name, 2))
    assert list(seen)[-2:] == ["head", "head:input"]
    assert set(seen) == {*built.layout.stages, *built.layout.extractor, *built.layout.header, "head", "head:input"}
    outputs = []
    built.module.head.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    assert built.module.eval()(batch(name, 2)) is outputs[0]


@pytest.mark.parametrize("name", MODELS)
def test_regions_cover_every_parameter(name):
    built = build(name, SMALL.get(name))
    named = (*built.layout.extractor, *built.layout.header, built.layout.head)
    for key, _ in built.module.named_parameters():
        assert sum(key.startswith(n + ".") for n in named) == 1, key
    regions = {built.layout.region(k) for k, _ in built.module.named_parameters()}
    assert regions == ({"extractor", "header", "head"} if built.layout.header else {"extractor", "head"})


# Names of saved weights are a promise: a change here makes old checkpoints unreadable.
NAMES = {
    "alexnet_bn": "cc3b61b58353", "cct": "9cdc3e6db13b", "digits_cnn": "4f15d7070cfb", "drug_target": "cb5d1d4d7ee9",
    "fasttext": "fccc9a13adb5", "fedavg_cnn": "778d18533936", "har_cnn": "346e5719b867", "lenet5": "f4204567fc6d",
    "mlp": "d69b1091842c", "mnist_cnn": "fed2b4436d26", "moon_cnn": "124415f3d323", "pfl_cnn": "dd7c4be3808e",
    "resnet18": "b61461263b97", "resnet50": "a884df40328d", "unet": "b543bf9f749a", "vgg11": "6129400dd1d8",
}


@pytest.mark.parametrize("name", MODELS)
def test_names_of_the_state_are_stable(name):
    names = " ".join(build(name, SMALL.get(name)).module.state_dict())
    assert hashlib.sha256(names.encode()).hexdigest()[:12] == NAMES[name], names


@pytest.mark.parametrize("name", MODELS)
def test_passes_read_nothing_on_the_host(name):
    """On the meta device tensors have no values, so a pass that reads one fails."""
    module = build(name, SMALL.get(name)).module.train().to("meta")
    module(batch(name, 2).to("meta"))


@pytest.mark.parametrize("name", MODELS)
def test_runs_through_the_door_with_keyed_dropout(name):
    built = build(name, SMALL.get(name))
    model = {"params": dict(built.module.named_parameters()), "buffers": dict(built.module.named_buffers())}
    points = dict.fromkeys([*built.layout.stages, built.layout.extracted, built.layout.features])
    network = Network(built.module, points)
    got, output = network.probe(model, batch(name, 2))
    assert output[0] == MODELS[name].example[1]
    assert set(built.layout.stages) <= set(got)


def test_unet_skips_are_untouched_by_what_happens_at_the_stage():
    module = build("unet", (3, 32, 32)).module.eval()
    x = batch("unet", 2, (3, 32, 32))

    def skips() -> dict[int, torch.Tensor]:
        """The second half of what each decoder receives."""
        got, hooks = {}, []
        for level in range(1, 5):
            decoder = module.get_submodule(f"decoder{level}")
            hooks.append(decoder.register_forward_pre_hook(
                lambda _m, args, level=level: got.update({level: args[0].chunk(2, 1)[1].clone()})))
        with torch.no_grad():
            got["logits"] = module(x)
        for h in hooks:
            h.remove()
        return got

    plain = skips()
    for level in range(1, 5):
        hook = module.get_submodule(f"pool{level}").register_forward_hook(lambda _m, _a, out: out * 3 + 1)
        augmented = skips()
        hook.remove()
        for other in range(1, level + 1):
            assert torch.equal(augmented[other], plain[other])              # taken before the pool
        for other in range(level + 1, 5):
            assert not torch.equal(augmented[other], plain[other])          # deeper encoders see the change
        assert not torch.equal(augmented["logits"], plain["logits"])
    hook = module.bottleneck.register_forward_hook(lambda _m, _a, out: out + 1)
    assert all(torch.equal(skips()[level], plain[level]) for level in range(1, 5))
    hook.remove()


def test_cct_attention_is_scaled_dot_product_attention():
    attention = build("cct(layers=1)").module.block1.attention.eval()
    x = rng.normal(rng.key(2, "tokens"), (2, 5, 256))
    q, k, v = (part.view(2, 5, 4, 64).transpose(1, 2) for part in attention.qkv(x).chunk(3, -1))
    expected = attention.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 256))
    assert torch.allclose(attention(x), expected, atol=1e-6)


def test_cct_stochastic_depth_grows_linearly_to_the_last_block():
    module = build("cct").module
    rates = [getattr(module.get_submodule(f"block{i}").drop1, "p", 0.0) for i in range(1, 8)]
    assert rates == pytest.approx([0, 0.1 / 6, 0.2 / 6, 0.3 / 6, 0.4 / 6, 0.5 / 6, 0.1])
    assert {module.get_submodule(f"block{i}").attention.dropout.p for i in range(1, 8)} == {0.1}


def test_alexnet_averages_as_the_adaptive_layer_does():
    pool = build("alexnet_bn").module.pool
    x = rng.normal(rng.key(3, "maps"), (2, 256, 7, 7))
    assert torch.allclose(pool(x), F.adaptive_avg_pool2d(x, 6), atol=1e-6)


def test_resnet_starts_kaiming_normal():
    # fan out of the CIFAR stem: 64 channels · 3 · 3 = 576, so the standard deviation is √(2/576) = 0.0589 over 1728 draws
    weight = build("resnet18(stem='3x3')").module.stem.conv.weight
    assert weight.std().item() == pytest.approx((2 / 576) ** 0.5, rel=0.1)


def test_pfl_cnn_starts_glorot_uniform():
    # The widest layer: 12,544 inputs and 128 outputs, so values lie within √(6/12672) = 0.02176 and nearly reach it.
    weight = build("pfl_cnn").module.neck[2].weight
    assert weight.shape == (128, 14 * 14 * 64)
    assert weight.abs().max().item() == pytest.approx((6 / 12_672) ** 0.5, rel=1e-3)
    assert weight.std().item() == pytest.approx((2 / 12_672) ** 0.5, rel=1e-2)      # a uniform number's: bound / √3


def test_pfl_cnn_drops_maps_and_features():
    built = build("pfl_cnn(map_dropout=0.75, dropout=0)")
    model = {"params": dict(built.module.named_parameters()), "buffers": {}}
    network = Network(built.module, ("stage2", "head:input"))
    x = batch("pfl_cnn", 4)
    passes = [network.forward(model, x, train, key=lambda n=n: rng.key(n, "coins")) for train, n in ((False, 0), (True, 0), (True, 1))]
    assert all(torch.equal(p.before["stage2"], passes[0].before["stage2"]) for p in passes)        # stages are not dropped
    features = [p.before["head:input"] for p in passes]
    assert not torch.equal(features[0], features[1])
    assert not torch.equal(features[1], features[2])


def test_fasttext_takes_the_mean_with_padding_and_may_log_softmax_its_features():
    module = build("fasttext", (4,), vocabulary=10).module
    tokens = torch.tensor([[3, 5, 0, 0]])
    rows = module.embedding.weight
    assert torch.allclose(module.mean(module.embedding(tokens)), (rows[3] + rows[5])[None] / 4)        # padding is zero, but counts
    squashed = build("fasttext(log_softmax=true)", (4,), vocabulary=10).module
    assert squashed.neck(squashed.mean(squashed.embedding(tokens))).exp().sum().item() == pytest.approx(1)


def test_drug_and_protein_see_their_own_characters():
    module = build("drug_target(drug_length=8, dropout=0)", (20,), vocabulary=30).module.eval()
    x = torch.arange(20)[None] + 1
    changed = x.clone()
    changed[0, 8:] = 7
    assert torch.equal(module.drug(x), module.drug(changed))
    assert not torch.equal(module.protein(x), module.protein(changed))


@settings(max_examples=15, deadline=None)
@given(channels=st.integers(1, 4), height=st.integers(8, 40), width=st.integers(8, 40), classes=st.integers(2, 12))
def test_digits_cnn_fits_any_small_image(channels, height, width, classes):
    sample = (channels, height, width)
    built = make("digits_cnn", sample=sample, classes=classes, key=KEY)
    seen = check_layout(built.module, built.layout, sample)
    assert built.layout.stages == ("stage1", "stage2")
    assert seen["stage2"] == (32, height // 4, width // 4)
    assert seen["head"] == (classes,)


@pytest.mark.parametrize(("text", "sample", "words"), [
    ("fedavg_cnn", (1, 8, 8), ["(1, 8, 8)", "fedavg_cnn", "stage2"]),
    ("unet", (3, 40, 40), ["multiples of 16", "(3, 40, 40)"]),
    ("fasttext", (200,), ["vocabulary"]),
    ("drug_target", (200,), ["vocabulary"]),
    ("resnet19", (3, 32, 32), ["Unknown model", "'resnet18'"]),
    ("resnet18(stems='3x3')", (3, 32, 32), ["'stems'", "'stem'"]),
    ("resnet18(stem='5x5')", (3, 32, 32), ["7x7, 3x3", "'5x5'"]),
    ("resnet18(norm='group', groups=3)", (3, 32, 32), ["groups", "64"]),
    ("cct(width=30)", (3, 32, 32), ["4 heads", "30"]),
    ("cct(dropout=1)", (3, 32, 32), ["dropout", "below 1"]),
    ("mlp(hidden=0)", (4,), ["Every item of the 'hidden' option", "at least 1"]),
    ("mlp(hidden=[20, -1])", (4,), ["Every item of the 'hidden' option", "-1"]),
])
def test_what_does_not_fit_is_said(text, sample, words):
    with pytest.raises(ConfigError) as error:
        make(text, sample=sample, classes=10, key=KEY)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_drug_length_must_leave_room_for_the_protein():
    with pytest.raises(ConfigError, match="drug_length"):
        make("drug_target", sample=(100,), classes=2, key=KEY, vocabulary=30)


def test_the_documented_table_is_true():
    """docs/models.md: | `name` | settings | parameters | input | stages | points |, for each model's example."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = {cells[1].strip("` "): [c.strip() for c in cells] for line in page.splitlines()
            if len(cells := line.split("|")) == 8 and cells[1].strip("` ") in MODELS}
    assert rows.keys() == MODELS.keys()
    for name, cells in rows.items():
        built = build(name)
        assert cells[3] == f"{count(built.module):,}", name
        assert cells[4].startswith("×".join(map(str, MODELS[name].example[0]))), name
        assert [n.strip("`") for n in cells[5].split(", ") if n != "–"] == list(built.layout.stages), name
        for f in dataclasses.fields(MODELS[name]):
            assert f"`{f.name}=" in cells[2], (name, f.name)


@pytest.mark.parametrize(("dataset", "sample", "more", "expected"), [
    ("digits", (1, 8, 8), {}, "digits_cnn"), ("cifar10", (3, 32, 32), {}, "fedavg_cnn"),
    ("office_caltech10", (3, 256, 256), {}, "alexnet_bn"), ("ag_news", (200,), {"vocabulary": 9}, "fasttext"),
    ("prostate_mri", (3, 384, 384), {"task": "segmentation"}, "unet"), ("uci_har", (9, 1, 128), {}, "har_cnn"),
    ("mine", (3, 10, 10), {}, "digits_cnn"), ("mine", (3, 48, 48), {}, "fedavg_cnn"), ("mine", (3, 224, 224), {}, "resnet18"),
    ("mine", (17,), {}, "mlp"), ("mine", (50,), {"vocabulary": 9}, "fasttext"),
    ("mine", (3, 64, 64), {"task": "segmentation"}, "unet"), ("mine", (6, 1, 100), {}, "mlp"),
])
def test_default_models_fit_their_data(dataset, sample, more, expected):
    name = default_for(dataset, sample, **more)
    assert name == expected
    make(name, sample=sample, classes=4, key=KEY, vocabulary=more.get("vocabulary"))
