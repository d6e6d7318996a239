"""Weights from a safetensors file."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from consilience import rng
from consilience.errors import DataError
from consilience.models import load_pretrained, make


def build(name: str = "digits_cnn", seed: int = 0, classes: int = 10, sample: tuple[int, ...] = (1, 8, 8)):
    return make(name, sample=sample, classes=classes, key=rng.key(seed, "model")).module


def test_round_trip(tmp_path):
    saved, other = build(), build(seed=1)
    saved.stage1[1].running_mean += 3
    save_file(saved.state_dict(), tmp_path / "w.safetensors")
    written = load_pretrained(other, tmp_path / "w.safetensors")
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert len(written) == len([n for n in saved.state_dict() if "num_batches" not in n])
    assert all(p.requires_grad for p in other.parameters())


def test_another_head_is_left_as_it_is(tmp_path):
    saved, other = build(), build(seed=1, classes=3)
    save_file(saved.state_dict(), tmp_path / "w.safetensors")
    before = other.head.weight.detach().clone()
    with pytest.raises(DataError, match=r"head.weight is \(10, 32\), the model's is \(3, 32\).*Only the head differs"):
        load_pretrained(other, tmp_path / "w.safetensors")
    load_pretrained(other, tmp_path / "w.safetensors", head="head")
    assert torch.equal(before, other.head.weight)
    assert torch.equal(saved.stage1[0].weight, other.stage1[0].weight)


def test_missing_and_unexpected_names_load_nothing(tmp_path):
    state = dict(build().state_dict())
    state["stage9.weight"] = state.pop("stage2.0.weight")
    save_file(state, tmp_path / "w.safetensors")
    other = build(seed=1)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(DataError) as error:
        load_pretrained(other, tmp_path / "w.safetensors")
    assert "missing: stage2.0.weight" in str(error.value)
    assert "not in the model: stage9.weight" in str(error.value)
    assert "Only the head" not in str(error.value)
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


def test_files_that_are_absent_or_damaged(tmp_path):
    with pytest.raises(DataError, match="no file"):
        load_pretrained(build(), tmp_path / "absent.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(DataError, match="not a readable safetensors"):
        load_pretrained(build(), tmp_path / "bad.safetensors")
    save_file(build().state_dict(), tmp_path / "cut.safetensors")
    whole = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.safetensors"):
        load_pretrained(build(), tmp_path / "cut.safetensors")


@pytest.mark.parametrize(("name", "ours", "published"), [
    ("resnet18", {"stem.conv.": "conv1.", "stem.norm.": "bn1.", "head.": "fc."}, "layer2.0.downsample.1.running_var"),
    ("vgg11", {"stage1.0.": "features.0.", "stage2.0.": "features.3.", "stage3.0.": "features.6.", "stage3.2.": "features.8.",
               "stage4.0.": "features.11.", "stage4.2.": "features.13.", "stage5.0.": "features.16.",
               "stage5.2.": "features.18.", "head.": "classifier."}, "features.18.bias"),
])
def test_published_names_are_understood(tmp_path, name, ours, published):
    saved, other = build(name, sample=(3, 32, 32)), build(name, seed=1, sample=(3, 32, 32))

    def rename(key: str) -> str:
        return next((new + key[len(start):] for start, new in ours.items() if key.startswith(start)), key)

    state = {rename(k): v for k, v in saved.state_dict().items() if "num_batches" not in k}
    assert published in state
    save_file(state, tmp_path / "w.safetensors")
    load_pretrained(other, tmp_path / "w.safetensors")
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in saved.state_dict().items())
