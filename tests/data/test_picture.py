"""The picture of a split: files are written, areas follow the counts, nothing global is touched."""

from __future__ import annotations

import builtins
import sys

import pytest
import torch

from consilience.data import picture
from consilience.data.federated import ClientRows, FederatedData
from consilience.errors import ConfigError, ConsilienceError

NONE = torch.zeros(0, dtype=torch.int64)


def made(clients: int, classes: int, names=None) -> FederatedData:
    y = torch.arange(clients * classes * 3) % classes
    rows = torch.arange(len(y)).chunk(clients)
    names = names or [f"client{i}" for i in range(clients)]
    owners = tuple(ClientRows(n, r, NONE, NONE) for n, r in zip(names, rows))
    return FederatedData("made", torch.zeros(len(y), 1), y, classes, owners)


@pytest.mark.parametrize(("clients", "classes"), [(2, 2), (20, 10), (100, 2), (2, 100), (100, 100), (250, 3)])
def test_png_and_svg_of_every_size(tmp_path, clients, classes):
    pytest.importorskip("matplotlib")
    png = picture.draw_split(made(clients, classes), tmp_path / "deep" / "split.png")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(png.read_bytes()[i:i + 4], "big") for i in (16, 20))
    assert 300 <= width <= 2500
    assert 150 <= height <= 1500
    if clients * classes < 1000:
        assert b"</svg>" in picture.draw_split(made(clients, classes), tmp_path / "split.svg").read_bytes()


def test_areas_are_proportional_to_samples(tmp_path, monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    made_figures = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, *a, **k: made_figures.append(self))
    picture.draw_counts(torch.tensor([[100, 0], [25, 50]]), ["client0", "client1"], tmp_path / "a.png")
    dots = made_figures[0].axes[0].collections[0]
    assert [tuple(p) for p in dots.get_offsets().tolist()] == [(0, 0), (1, 0), (1, 1)]      # (client, class); no circle for 0
    sizes = dots.get_sizes()
    assert sizes / sizes[0] == pytest.approx([1, 0.25, 0.5])                                # scatter sizes are areas


def test_labels_of_many_clients_do_not_collide(tmp_path, monkeypatch):
    """No two tick labels of an axis overlap when the picture is drawn."""
    figure_module = pytest.importorskip("matplotlib.figure")
    backend = pytest.importorskip("matplotlib.backends.backend_agg")
    made_figures = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, *a, **k: made_figures.append(self))
    for clients, classes in ((100, 100), (20, 10), (8, 7)):
        names = [f"art_painting_{i}-{i + 3}" for i in range(clients)] if clients == 8 else None
        picture.draw_split(made(clients, classes, names), tmp_path / "a.png")
    for figure in made_figures:
        canvas = backend.FigureCanvasAgg(figure)
        canvas.draw()
        for axis, low, high in ((figure.axes[0].xaxis, "x0", "x1"), (figure.axes[0].yaxis, "y0", "y1")):
            boxes = [t.get_window_extent(canvas.get_renderer()) for t in axis.get_ticklabels() if t.get_text()]
            assert len(boxes) > 1
            assert all(getattr(b, low) >= getattr(a, high) for a, b in zip(boxes, boxes[1:]))  # noqa: RUF007
            assert all(b.x0 >= 0 and b.y0 >= 0 for b in boxes)                              # nor leave the page


def test_pyplot_is_not_used(tmp_path):
    pytest.importorskip("matplotlib")
    before = "matplotlib.pyplot" in sys.modules
    picture.draw_split(made(3, 3), tmp_path / "a.png")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
        picture.draw_split(made(2, 2), tmp_path / "split.jpeg")
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConsilienceError, match="pip install matplotlib"):
        picture.draw_split(made(2, 2), tmp_path / "split.png")
