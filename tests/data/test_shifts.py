"""Shifts: who is changed, by how much, and that a draw depends on its row and key only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from consilience import rng
from consilience.data import geometry, shifts
from consilience.errors import ConfigError


@pytest.fixture
def images():
    return rng.integers(rng.key(7), 256, (60, 3, 8, 8)).to(torch.uint8)


ROWS = [torch.arange(0, 20), torch.arange(20, 40), torch.arange(40, 55)]        # rows 55 … 59 belong to no one
ALL = ["rotation(step=30)", "drawn_rotation", "noise(std=0.2)", "noise(std=0.2, level=fixed)", "frozen_crop_flip(pad=2)",
       "rotation(step=30)+noise(std=0.1)"]


@pytest.mark.parametrize("text", ALL)
def test_what_holds_for_every_shift(text, images):
    before = images.clone()
    shift = shifts.make(text)
    out = shift.apply(images, ROWS, rng.key(0))
    assert torch.equal(images, before)                                           # the input is not written to
    assert out.shape == images.shape
    assert out.dtype == torch.uint8
    assert torch.equal(out[55:], images[55:])                                    # rows of no client
    assert not torch.equal(out[:55], images[:55])
    assert torch.equal(out, shifts.make(shift.text).apply(images, ROWS, rng.key(0)))
    # A row's change depends on its client and its number, not on the rows beside it or their order.
    fewer = shift.apply(images, [r[5:].flip(0) for r in ROWS], rng.key(0))
    for rows in ROWS:
        assert torch.equal(fewer[rows[5:]], out[rows[5:]])
        assert torch.equal(fewer[rows[:5]], images[rows[:5]])


@pytest.mark.parametrize("text", ALL[1:])
def test_another_key_is_another_draw(text, images):
    shift = shifts.make(text)
    assert not torch.equal(shift.apply(images, ROWS, rng.key(0)), shift.apply(images, ROWS, rng.key(1)))


def test_none_gives_the_samples_back(images):
    assert torch.equal(shifts.make("none").apply(images, ROWS, rng.key(0)), images)
    text = torch.arange(10).reshape(5, 2)
    assert torch.equal(shifts.make("none").apply(text, [torch.arange(5)], rng.key(0)), text)


def test_rotation_of_client_i_is_i_steps(images):
    out = shifts.make("rotation(step=90)").apply(images, ROWS, rng.key(0))
    for client, rows in enumerate(ROWS):                                         # counter-clockwise, exact for quarter turns
        assert torch.equal(out[rows], torch.rot90(images[rows], client, (2, 3)))
    out = shifts.make("rotation(step=0, start=180)").apply(images, ROWS, rng.key(0))
    assert torch.equal(out[:55], images[:55].flip(2, 3))


def test_rotation_by_hand():
    """45° on a 3 × 3 image. The centre stays. cos = sin = 0.7071, pixel centres at −1, 0, 1 from the middle.

    Counter-clockwise by 45°, the target right of the middle (1, 0) comes from (0.7071, 0.7071) with y downwards, which rounds to
    the corner (1, 1): 9. The target corner (1, 1) comes from (0.7071 − 0.7071, 1.4142) = (0, 1.41): below the middle, 1.41
    rounds to 1: 8. So every pixel moves one place along the ring, counter-clockwise.
    """
    image = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8)[None, None]
    expected = [[2, 3, 6], [1, 5, 9], [4, 7, 8]]
    assert geometry.rotate(image, torch.tensor(45.0))[0, 0].tolist() == expected


def test_corners_from_outside_are_zero():
    full = torch.full((1, 1, 9, 9), 200, dtype=torch.uint8)
    turned = geometry.rotate(full, torch.tensor(45.0))[0, 0]
    assert turned[[0, 0, -1, -1], [0, -1, 0, -1]].tolist() == [0] * 4
    assert turned[4].tolist() == [200] * 9


@pytest.mark.parametrize("shape", [(28, 28), (32, 32), (7, 7), (8, 5), (33, 20)])
def test_rotation_equals_pillow(shape):
    image_module = pytest.importorskip("PIL.Image")
    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for angle in [*range(0, 360, 15), -30, -7.3, 12.34, 359.9]:
        expected = np.asarray(image_module.fromarray(picture).rotate(angle))
        found = geometry.rotate(torch.from_numpy(picture)[None, None], torch.tensor(float(angle)))[0, 0]
        assert np.array_equal(found.numpy(), expected), angle


def test_drawn_rotation_uses_the_angles_and_a_distribution_per_client():
    shift = shifts.DrawnRotation(concentration=1.0)
    rows = torch.arange(4000)
    clients = [shift.degrees(rows, client, rng.key(0)) for client in range(60)]
    shares = torch.stack([torch.bincount((d / 15).long(), minlength=10) / 4000 for d in clients])
    assert {float(a) for d in clients for a in d.unique()} <= {15.0 * i for i in range(10)}
    # Dir(1) over ten angles has exp(entropy) of 7.0 on average, Dir(0.1) 2.5 (20,000 draws each); 60 clients: ± 0.7.
    effective = lambda p: float(torch.special.entr(p).sum(1).exp().mean())
    assert effective(shares) == pytest.approx(7.0, abs=0.7)
    narrow = shifts.DrawnRotation(concentration=0.1)
    few = torch.stack([torch.bincount((narrow.degrees(rows, c, rng.key(0)) / 15).long(), minlength=10) / 4000 for c in range(60)])
    assert effective(few) == pytest.approx(2.5, abs=0.7)


def test_drawn_rotation_rotates_each_image_by_its_angle(images):
    shift = shifts.DrawnRotation()
    out = shift.apply(images, ROWS, rng.key(0))
    key = rng.key(rng.key(0), "shift", "drawn_rotation")
    for client, rows in enumerate(ROWS):
        for row, angle in zip(rows.tolist(), shift.degrees(rows, client, key)):
            assert torch.equal(out[row:row + 1], geometry.rotate(images[row:row + 1], angle))


def test_noise_grows_from_client_to_client():
    x = torch.zeros(30, 1, 40, 40)                                               # 10 images of 1600 values per client
    rows = list(torch.arange(30).split(10))
    out = shifts.make("noise(std=0.3)").apply(x, rows, rng.key(0))
    # Client i of 3 has 0.3 · (i + 1) / 3; the deviation of 16,000 numbers is known to 0.6 %.
    assert [float(out[r].std()) for r in rows] == pytest.approx([0.1, 0.2, 0.3], rel=0.03)
    out = shifts.make("noise(std=0.3, level=fixed)").apply(x, rows, rng.key(0))
    assert [float(out[r].std()) for r in rows] == pytest.approx([0.3] * 3, rel=0.03)
    assert not torch.equal(out[0], out[1])                                       # drawn per sample


def test_noise_on_bytes_is_rounded_and_clipped():
    x = torch.full((2, 1, 50, 50), 128, dtype=torch.uint8)
    out = shifts.make("noise(std=0.1, level=fixed)").apply(x, [torch.arange(2)], rng.key(0))
    assert float(out.float().std()) == pytest.approx(25.5, rel=0.05)             # 0.1 of 255
    wild = shifts.make("noise(std=5, level=fixed)").apply(x, [torch.arange(2)], rng.key(0))
    assert int((wild == 0).sum()) > 1000
    assert int((wild == 255).sum()) > 1000


def test_frozen_crop_flip_moves_whole_images():
    # Values 1 … 64 tell the place; each output is a window of the zero-padded image, perhaps mirrored.
    image = torch.arange(1, 65, dtype=torch.uint8).reshape(1, 1, 8, 8)
    out = shifts.make("frozen_crop_flip(pad=2)").apply(image.expand(200, 1, 8, 8).clone(), [torch.arange(200)], rng.key(0))
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))[0, 0]
    windows = {tuple(w.flatten().tolist()) for top in range(5) for left in range(5)
               for w in (padded[top:top + 8, left:left + 8], padded[top:top + 8, left:left + 8].flip(1))}
    found = {tuple(o.flatten().tolist()) for o in out}
    assert found <= windows
    assert len(found) > 40                                                       # of 50 that 200 draws can reach


def test_masks_move_with_their_images(images):
    shift = shifts.make("drawn_rotation+frozen_crop_flip")
    assert shift.moves_pixels
    assert not shifts.make("noise").moves_pixels
    mask = images[:, :1].long()
    assert torch.equal(shift.apply(mask, ROWS, rng.key(3)), shift.apply(images, ROWS, rng.key(3))[:, :1].long())


def test_refusals(images):
    with pytest.raises(ConfigError, match="Did you mean 'rotation'"):
        shifts.make("rotations")
    with pytest.raises(ConfigError, match="needs images"):
        shifts.make("rotation").apply(torch.zeros(4, 10), [torch.arange(4)], rng.key(0))
    with pytest.raises(ConfigError, match="real numbers"):
        shifts.make("noise").apply(torch.zeros(4, 10, dtype=torch.int64), [torch.arange(4)], rng.key(0))
    with pytest.raises(ConfigError, match="at least 0"):
        shifts.make("noise(std=-1)")
