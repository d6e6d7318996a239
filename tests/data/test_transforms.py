"""Transforms: exact pixels, keyed draws, nothing that makes the host wait."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from consilience import rng
from consilience.data import from_arrays, geometry, load, transforms
from consilience.data.dataset import Dataset
from consilience.errors import ConfigError
from consilience.kernels import batch

EVERYTHING = [*transforms.STEPS, *transforms.NAMED, "crop+flip+normalise"]


class NoHostSync(TorchDispatchMode):
    """Refuses what would make the host wait for the device, give a shape that depends on values, or copy from the host."""

    BAD = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default", "_to_copy.device")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        indices = args[1] if name.startswith("aten.index") and len(args) > 1 and isinstance(args[1], (list, tuple)) else []
        if any(b in name for b in self.BAD) or any(torch.is_tensor(i) and i.dtype == torch.bool for i in indices):
            raise AssertionError(f"host sync: {name}")
        return func(*args, **(kwargs or {}))


def images(n=40, size=12, channels=3):
    return rng.integers(rng.key(11), 256, (n, channels, size, size)).to(torch.uint8)


def dataset(x=None, **more) -> Dataset:
    x = images() if x is None else x
    more = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7)} | more
    return Dataset("made", x, torch.arange(len(x)) % 4, 4, **more)


@pytest.mark.parametrize("text", EVERYTHING)
def test_what_holds_for_every_transform(text):
    data = dataset()
    before, transform, key = data.x.clone(), transforms.make(text, data), rng.key(0)
    with NoHostSync():
        x, y = transform(data.x, data.y, key)
        again, _ = transform(data.x, data.y, key)
        plain, same = transform(data.x, data.y, None)
    assert torch.equal(data.x, before)
    assert x.shape == data.x.shape
    assert x.dtype == plain.dtype == torch.float32
    assert torch.equal(x, again)
    assert torch.equal(y, data.y)
    assert torch.equal(same, data.y)
    assert torch.equal(transforms.make(transform.text, data)(data.x, data.y, key)[0], x)      # the text makes the same
    draws = any(s.draws for s in transform.steps)
    assert torch.equal(x, plain) != bool(draws)
    if draws:
        assert not torch.equal(x, transform(data.x, data.y, rng.key(1))[0])
        one = data.x[:1].expand(40, -1, -1, -1)                                  # the same image forty times
        assert len(torch.unique(transform(one, data.y, key)[0], dim=0)) > 1      # each draws for itself


def test_the_watch_catches_a_look_at_a_value():
    with pytest.raises(AssertionError, match="host sync"), NoHostSync():
        bool(torch.ones(2).sum() > 1)
    with pytest.raises(AssertionError, match="host sync"), NoHostSync():
        torch.ones(3)[torch.tensor([True, False, True])]


def test_none_and_raw_and_normalise_by_hand():
    x = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)
    data = dataset(x)
    y = torch.zeros(1, dtype=torch.int64)
    flat = lambda text: transforms.make(text, data)(x, y, None)[0].flatten().tolist()
    assert flat("none") == pytest.approx([0.0, 0.2, 1.0])
    assert flat("raw") == [0.0, 51.0, 255.0]
    # (0 − .1) / .5 = −.2, (.2 − .2) / .6 = 0, (1 − .3) / .7 = 1
    assert flat("normalise") == pytest.approx([-0.2, 0.0, 1.0])
    assert flat("half") == pytest.approx([-1.0, -0.6, 1.0])
    assert flat("normalise(mean=(0, 0.1, 0.5), std=(1, 0.5, 0.5))") == pytest.approx([0.0, 0.2, 1.0])


def test_without_a_text_the_data_set_decides():
    assert transforms.make(None, dataset()).text == "normalise(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))"
    assert transforms.make(None, dataset(mean=(), std=())).text == "none"


def windows(image, pad, mode):
    """All crops of one (1, 1, h, w) image, as torch's own padding makes them."""
    padded = torch.nn.functional.pad(image.float(), (pad,) * 4, mode=mode)[0, 0]
    size = image.shape[-1]
    return [padded[a:a + size, b:b + size] for a in range(2 * pad + 1) for b in range(2 * pad + 1)]


@pytest.mark.parametrize(("mode", "torch_mode"), [("zero", "constant"), ("reflect", "reflect")])
def test_crop_is_a_window_of_the_padded_image(mode, torch_mode):
    image = torch.arange(36, dtype=torch.uint8).reshape(1, 1, 6, 6) + 1
    x = image.expand(900, 1, 6, 6)
    data = dataset(x, mean=(), std=())
    out = transforms.make(f"crop(pad=2, mode={mode})+raw", data)(x, data.y, rng.key(0))[0]
    possible = {tuple(w.flatten().tolist()): 0 for w in windows(image, 2, torch_mode)}
    for o in out:
        possible[tuple(o.flatten().tolist())] += 1                              # KeyError if it is no window
    # 900 draws over 25 windows: 36 each, deviation 5.9; all within 5 deviations.
    assert len(possible) == 25
    assert min(possible.values()) >= 7
    assert max(possible.values()) <= 65


def test_flip_is_exact_and_keeps_its_probability():
    x = images(4000, 4, 1)
    data = dataset(x, mean=(), std=())
    for p, axes in ((0.5, "horizontal"), (0.2, "horizontal"), (0.75, "any")):
        out = transforms.make(f"flip(p={p}, axes={axes})+raw", data)(x, data.y, rng.key(0))[0].to(torch.uint8)
        found = {dims: (out == (x.flip(dims) if dims else x)).flatten(1).all(1) for dims in ((), (3,), (2,), (2, 3))}
        assert torch.stack(list(found.values())).any(0).all()                    # every image is one of the four
        share = 1 - float(found[()].float().mean())
        assert share == pytest.approx(p, abs=0.035)                             # 4000 draws: 4 deviations are at most 0.032
        if axes == "any":
            assert [float(found[d].float().mean()) for d in ((3,), (2,), (2, 3))] == pytest.approx([0.25] * 3, abs=0.035)
        else:
            assert not found[2,].any()


def test_rotation_stays_in_its_range_and_rot90_turns():
    x = images(300, 9, 1)
    data = dataset(x, mean=(), std=())
    out = transforms.make("rotation(degrees=30)+raw", data)(x, data.y, rng.key(0))[0].to(torch.uint8)
    angles = (2 * rng.uniform(rng.key(rng.key(0), "transform"), (300,)) - 1) * 30
    assert float(angles.min()) < -25
    assert float(angles.max()) > 25
    for i in range(0, 300, 30):
        assert torch.equal(out[i:i + 1], geometry.rotate(x[i:i + 1], angles[i]))
    out = transforms.make("rot90+raw", data)(x, data.y, rng.key(0))[0].to(torch.uint8)
    turned = torch.stack([(out == torch.rot90(x, k, (2, 3))).flatten(1).all(1) for k in range(4)])
    assert turned.any(0).all()
    assert (turned.float().mean(1) > 0.15).all()                                # each quarter about 0.25


def test_cutout_sets_one_square_to_zero_after_normalising():
    x = torch.full((2000, 3, 12, 12), 255, dtype=torch.uint8)
    data = dataset(x)
    out = transforms.make("normalise+cutout(size=4)", data)(x, data.y, rng.key(0))[0]
    hole = out == 0
    assert torch.equal(hole[:, 0], hole[:, 2])
    rows, columns = hole[:, 0].any(2).sum(1), hole[:, 0].any(1).sum(1)
    assert torch.equal(hole[:, 0].sum((1, 2)), rows * columns)                  # a rectangle
    # The centre c is 0 … 11 and the square c − 2 … c + 1, cut at the edges: 2 rows for c = 0, 3 for 1 and 11, else 4.
    assert set(rows.tolist()) == {2, 3, 4}
    assert float((rows == 4).float().mean()) == pytest.approx(9 / 12, abs=0.08)
    # The first row is in the square for c = 0, 1, 2, the last for c = 10, 11.
    assert float(hole[:, 0].any(2)[:, 0].float().mean()) == pytest.approx(3 / 12, abs=0.05)
    assert float(hole[:, 0].any(2)[:, -1].float().mean()) == pytest.approx(2 / 12, abs=0.05)
    assert float(out[~hole].unique().numel()) == 3                              # elsewhere only the three normalised whites


def test_a_later_step_changes_no_draw_of_an_earlier_one():
    data = dataset()
    alone = transforms.make("rotation", data)(data.x, data.y, rng.key(0))[0]
    flipped = transforms.make("rotation+flip", data)(data.x, data.y, rng.key(0))[0]
    same = (flipped == alone).flatten(1).all(1) | (flipped == alone.flip(-1)).flatten(1).all(1)
    assert same.all()


def test_two_steps_do_not_share_their_draws():
    # Were they shared, two flips would undo each other in every image.
    data = dataset()
    twice = transforms.make("flip+flip+raw", data)(data.x, data.y, rng.key(0))[0].to(torch.uint8)
    changed = float((twice != data.x).flatten(1).any(1).float().mean())
    assert 0.2 < changed < 0.8                                                  # one of two flips: half of 40 images


def test_steps_run_in_the_order_written():
    data = dataset()
    one = transforms.make("flip+rotation", data)(data.x, data.y, rng.key(0))[0]
    two = transforms.make("rotation+flip", data)(data.x, data.y, rng.key(0))[0]
    assert not torch.equal(one, two)


def test_masks_move_with_their_images():
    x = images(30, 16, 1)
    masks = x[:, 0].long()                                                      # the mask repeats the image: both must move alike
    data = Dataset("scans", x, masks, 256, task="segmentation")
    for text in ("flip", "rot90", "rotation", "crop", "fedfa_prostate_released", "rotation+crop+flip"):
        moved, mask = transforms.make(text, data)(x, masks, rng.key(0))
        scale = 1 if "prostate" in text else 255
        assert mask.dtype == torch.int64
        assert torch.equal((moved[:, 0] * scale).round().long(), mask), text
        assert not torch.equal(mask, masks)
        assert torch.equal(transforms.make(text, data)(x, masks, None)[1], masks)
    _, mask = transforms.make("cutout", data)(x, masks, rng.key(0))
    assert torch.equal(mask, masks)


def test_text_passes_untouched_and_signals_can_be_normalised():
    tokens = torch.arange(20).reshape(4, 5)
    data = Dataset("news", tokens, torch.zeros(4, dtype=torch.int64), 4)
    out, _ = transforms.make(None, data)(tokens, data.y, rng.key(0))
    assert out.dtype == torch.int64
    assert torch.equal(out, tokens)
    with pytest.raises(ConfigError, match="needs images"):
        transforms.make("flip", data)
    with pytest.raises(ConfigError, match="Use 'none'"):
        transforms.make("half", Dataset("news", tokens, data.y, 4))
    signals = torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]])                         # (2, 1, 2): one channel
    data = Dataset("signals", signals, torch.zeros(2, dtype=torch.int64), 1, mean=(4.0,), std=(2.0,))
    out, _ = transforms.make("normalise", data)(signals, data.y, None)
    assert out.flatten().tolist() == [-1.5, -0.5, 0.5, 1.5]                     # not divided by 255


def test_the_papers_lists():
    data = dataset()
    steps = lambda name: [s.name for s in transforms.make(name, data).steps]
    assert steps("moon_cifar10") == ["crop", "flip", "normalise"]
    assert transforms.make("moon_cifar10", data).steps[0].mode == "reflect"
    assert transforms.make("moon_cifar10", data).steps[2].mean == pytest.approx((125.3 / 255, 123.0 / 255, 113.9 / 255))
    assert steps("moon_cifar100") == steps("fedfm_cifar100") == ["crop", "flip", "rotation", "normalise"]
    assert steps("fedml") == ["crop", "flip", "normalise", "cutout"]
    assert steps("fedbr") == steps("fedfa_office_released") == ["none"]
    assert steps("fedfa_office") == steps("fedfa_domainnet") == ["flip", "rotation"]
    assert steps("dbe") == ["normalise"]


def test_refusals():
    data = dataset()
    with pytest.raises(ConfigError, match="Did you mean 'normalise'"):
        transforms.make("normalize", data)
    with pytest.raises(ConfigError, match="has no settings"):
        transforms.make("fedml(size=3)", data)
    with pytest.raises(ConfigError, match="no mean and standard deviation"):
        transforms.make("normalise", dataset(mean=(), std=()))
    with pytest.raises(ConfigError, match="2 means for 3 channels"):
        transforms.make("normalise(mean=(1, 2), std=(1, 2))", data)
    with pytest.raises(ConfigError, match="positive"):
        transforms.make("normalise(mean=(0,), std=(0,))", data)
    with pytest.raises(ConfigError, match="square"):
        transforms.make("rot90", dataset(torch.zeros(4, 3, 5, 6, dtype=torch.uint8)))
    with pytest.raises(ConfigError, match="at most 11"):
        transforms.make("crop(pad=12, mode=reflect)", data)


@pytest.mark.gpu
@pytest.mark.parametrize("text", EVERYTHING)
def test_a_captured_transform_equals_the_cpu(text):
    """Inside a CUDA graph, with the key in device memory: a replay with a new key gives what the CPU gives for that key."""
    data = dataset()
    transform = transforms.make(text, data)
    x, y, key = data.x.cuda(), data.y.cuda(), rng.key(0).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        transform(x, y, key)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = transform(x, y, key)
    for seed in (1, 2):
        key.copy_(rng.key(seed))
        graph.replay()
        torch.testing.assert_close(out.cpu(), transform(data.x, data.y, rng.key(seed))[0], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("text", ["none", "normalise", "crop+flip+normalise", "crop(pad=2, mode=reflect)+normalise", "flip(p=0.3)"])
def test_picking_a_batch_in_one_kernel(text, channels_last):
    """Rows by the counter, their labels, the transform with the step's key: inside a CUDA graph what the CPU gives in pieces."""
    data = dataset()
    transform = transforms.make(text, data)
    index, key = rng.integers(rng.key(1), len(data.x), (4, 6)), rng.key(2, "slot")
    x, y, there, seed, counter = data.x.cuda(), data.y.cuda(), index.cuda(), key.cuda(), torch.zeros(1, dtype=torch.int64, device="cuda")
    pick = lambda: transform.gather(x, y, there, counter, 5, seed, channels_last)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        pick()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, labels = pick()
    for step in (3, 1):
        counter.fill_(step)
        graph.replay()
        rows = index[step][:5]
        wanted, wanted_labels = transform(data.x[rows], data.y[rows], rng.key(rng.fold(key, step), "transform"))
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(labels.cpu(), wanted_labels.long())
        assert not channels_last or out.is_contiguous(memory_format=torch.channels_last)


def test_what_the_kernel_does_not_know_is_picked_in_pieces(monkeypatch):
    data = dataset()
    rows, counter = torch.arange(4)[None], torch.zeros(1, dtype=torch.int64)

    def picked(text, y=data.y, rows=rows, **more):
        return transforms.make(text, dataset(**more)).gather(data.x, y, rows, counter, 4, rng.key(0), False)

    assert picked("none") is None                                    # the samples lie on the host
    monkeypatch.setattr(batch, "usable", lambda x, samples: True)
    monkeypatch.setattr(batch, "gather", lambda *args: "one kernel")
    for known in ("none", "normalise", "crop+flip+normalise", "flip(p=0.3)"):
        assert picked(known) == "one kernel"
    masks = torch.zeros(len(data.x), 12, 12, dtype=torch.uint8)
    for unknown in ("rotation(degrees=20)", "crop+flip+rotation+normalise", "flip+crop", "flip(axes=any)", "crop+cutout"):
        assert picked(unknown) is None, unknown
    assert picked("crop", task="segmentation") is None               # the masks have to move along
    assert picked("none", y=masks) is None
    assert picked("none", y=torch.arange(80)[::2]) is None
    assert picked("none", rows=torch.arange(8)[None, ::2].expand(2, 4)) is None


def test_standardise_is_normalise_by_the_training_samples():
    # column 0: 1, 3, 5, 7 and column 1: always 2; the rows that train are 0 and 2: mean 3 and 2, deviation 2 and none
    x = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 2.0], [7.0, 2.0]])
    made = transforms.make("standardise", dataset(x, mean=(), std=()), lambda: transforms.mean_and_std(x, torch.tensor([0, 2]), piece=1))
    assert made.text == "normalise(mean=(3.0, 2.0), std=(2.0, 1.0))"
    assert made(x, x, None)[0].tolist() == [[-1, 0], [0, 0], [1, 0], [2, 0]]
    mean, std = transforms.mean_and_std(images(), torch.arange(10))
    pixels = images()[:10].double() / 255
    assert mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), rel=1e-5)
    assert std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), rel=1e-5)
    with pytest.raises(ConfigError, match="takes its numbers from the training samples"):
        transforms.make("standardise", dataset(x))
    with pytest.raises(ConfigError, match=r"has no settings.*normalise\(mean="):
        transforms.make("standardise(mean=1)", dataset(x), lambda: ((), ()))
    with pytest.raises(ConfigError, match=r"holds torch.int64"):
        transforms.make("standardise", dataset(x.long()), lambda: ((), ()))


def test_a_run_s_standardise_leaves_tests_and_clients_held_out_aside():
    x = torch.arange(80.0).view(40, 2) ** 2
    mine = from_arrays(x.numpy(), [0, 1] * 20, [i // 10 for i in range(40)])
    data = load(mine, transform="standardise", hold_out=["3"])
    rows = torch.cat([c.train for c in data.clients])
    assert len(rows) == 3 * 7
    assert data.description["transform"] == transforms.Normalise(*transforms.mean_and_std(x, rows)).text
    assert data.transform(x[rows], rows, None)[0].mean(0).tolist() == pytest.approx([0, 0], abs=1e-5)
