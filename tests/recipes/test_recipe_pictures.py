"""Pictures: well-formed SVG of the right things."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from tiny_recipe import TINY

from consilience.recipes.draw import draw
from consilience.recipes.load import load_recipe
from consilience.recipes.run import Order, reproduce
from consilience.recipes.svg import Line, Points, draw_grid, draw_lines, draw_points

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}text")]


def test_lines_break_at_gaps_and_escape_their_words():
    svg = draw_lines([Line("a < b & c", [1, 2, 3, 4], [0.1, None, 0.3, 0.4])], "A <title>", "round", "accuracy")
    assert "a < b & c" in texts(svg)
    assert "A <title>" in texts(svg)
    lines = list(ET.fromstring(svg).iter(f"{SVG}polyline"))
    assert [len(p.get("points").split()) for p in lines] == [1, 2]                # a gap after the first point


def test_higher_values_are_drawn_higher():
    points = ET.fromstring(draw_lines([Line("a", [0, 1], [0.0, 1.0])], "", "", "")).find(f"{SVG}polyline").get("points").split()
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in points)
    assert x1 > x0
    assert y1 < y0


def test_nothing_to_draw_says_so():
    assert "no values" in draw_lines([Line("a", [1], [None])], "empty", "x", "y")


def test_circles_have_areas_like_counts():
    circles = list(ET.fromstring(draw_grid([[4, 0], [1, 4]], "t")).iter(f"{SVG}circle"))
    radii = sorted(float(c.get("r")) for c in circles)
    assert len(radii) == 3                                                        # no circle for no samples
    assert radii[-1] / radii[0] == pytest.approx(2.0, rel=0.01)                   # area 4 : 1


def test_points_in_panels():
    svg = draw_points([Points("one", [(0, 0), (1, 1)], [0, 1], [0, 1]), Points("two", [(0.5, 0.5)], [2])], "t")
    assert {"one", "two"} <= set(texts(svg))
    assert len(list(ET.fromstring(svg).iter(f"{SVG}circle"))) == 2
    assert len(list(ET.fromstring(svg).iter(f"{SVG}path"))) == 1


def test_pictures_of_a_recipe(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("consilience.recipes.draw.SAMPLES", 40)
    more = "".join(f"\n[[draw]]\nkind = \"{kind}\"\n{rest}" for kind, rest in (
        ("curves", 'y = "personalised"\n'), ("bars", ""), ("trace", 'measure = "cka(looks=2, samples=50)"\ny = "cka"\n'),
        ("features", 'model = "both"\ntraining = ["before"]\n'), ("splits", "")))
    tiny.write_text(TINY + more, encoding="utf-8")
    recipe = load_recipe(tiny)
    outcome = reproduce(recipe, tmp_path / "out", Order((), ("accuracy",), 1, 0.5), jobs=1)
    names = draw(outcome, tmp_path / "out")
    # two columns of the recipe differ in scoring alone: their curves and splits are drawn once
    assert [n.split("-")[1] for n in names] == ["curves", "bars", "trace", "features", "splits"], outcome.remarks
    written = {n: (tmp_path / "out" / n).read_text(encoding="utf-8") for n in names}
    for name, svg in written.items():
        ET.fromstring(svg)
        assert ("SCALED DOWN" in svg) == ("splits" not in name), name
    curves = written[names[0]]
    assert {"FedAvg", "FedAvg+DBE"} <= set(texts(curves))
    panels = texts(written[names[3]])[1:]
    assert panels == ["FedAvg", "as served, before local training", "FedAvg+DBE", "without personal tensors, before local training",
                      "FedAvg+DBE", "as served, before local training"]
    assert not outcome.remarks


def test_a_recipe_of_splits_trains_nothing(tmp_path):
    path = tmp_path / "figure1.toml"
    path.write_text('title = "Splits"\n[columns.a]\nrun = { data = "digits", clients = 3, split = "iid" }\n[[draw]]\nkind = "splits"\n',
                    encoding="utf-8")
    recipe = load_recipe(path)
    outcome = reproduce(recipe, tmp_path / "out", Order())
    assert draw(outcome, tmp_path / "out") == ["figures/1-splits-a.svg"]
    assert not (tmp_path / "out" / "runs").exists()
    circles = list(ET.fromstring((tmp_path / "out/figures/1-splits-a.svg").read_text()).iter(f"{SVG}circle"))
    assert len(circles) == 30                                                     # three clients, ten classes
