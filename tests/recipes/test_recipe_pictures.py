"""Pictures: well-formed SVG of the right things."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch
from tiny_recipe import TINY

from consilience import rng
from consilience.errors import ConfigError, ConsilienceError
from consilience.metrics.subject import Subject
from consilience.recipes.draw import draw
from consilience.recipes.draw_models import _answers_on_others, _embedded, _Panel, _Row, _shares
from consilience.recipes.folders import opened
from consilience.recipes.format import Drawing
from consilience.recipes.load import load_recipe
from consilience.recipes.run import Order, reproduce
from consilience.recipes.svg import Line, Points, draw_grid, draw_lines, draw_points

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}text")]


def below_title(svg: str) -> list[str]:
    """A title is written larger than everything else, in as many lines as it needs."""
    return [t.text or "" for t in ET.fromstring(svg).iter(f"{SVG}text") if t.get("font-size") != "14"]


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


LONG = "Features by t-SNE (colour: class, shape: client), CIFAR-10 [SCALED DOWN: a tenth of rounds, so these are not the table's numbers]"


@pytest.mark.parametrize("draw_it", [
    lambda title: draw_points([Points("one", [(0.5, 0.5)], [0])], title, title),
    lambda title: draw_lines([Line("a", [0, 1], [0.0, 1.0])], f"{title} {title}", "x", "y"),
    lambda title: draw_grid([[4, 0], [1, 4]], title)])
def test_long_titles_stand_inside_the_picture_and_above_its_frame(draw_it):
    picture = ET.fromstring(draw_it(LONG))
    words = [w for w in picture.iter(f"{SVG}text") if len(w.text or "") > 9]
    assert " ".join(w.text for w in words).startswith(LONG)
    # a letter is taken to be half as wide as it is high, which holds for sans-serif letters on average
    assert max(float(w.get("x")) + len(w.text) * float(w.get("font-size")) / 2 for w in words) <= float(picture.get("width"))
    frame = next(r for r in picture.iter(f"{SVG}rect") if r.get("fill") == "none")
    assert max(float(w.get("y")) for w in words) < float(frame.get("y"))


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
    caption, *panels = below_title(written[names[3]])
    assert caption == "One t-SNE for: FedAvg, 1 panel, 40 points; FedAvg+DBE, 2 panels, 80 points."
    assert panels == ["FedAvg", "as served, before local training", "FedAvg+DBE", "without personal tensors, before local training",
                      "FedAvg+DBE", "as served, before local training"]
    assert not outcome.remarks


def test_bars_over_some_columns(tiny, tmp_path):
    """A column that is no place on the axis, such as the score of an early round, stays out of the picture."""
    bars = lambda name: f'\n[[draw]]\nkind = "bars"\ncolumns = ["{name}"]\n'
    tiny.write_text(TINY + '\n[[draw]]\nkind = "bars"\n' + bars("accuracy"), encoding="utf-8")
    outcome = reproduce(load_recipe(tiny), tmp_path / "out", Order(("fedavg",), (), 1, 0.5), jobs=1)
    every, one = (texts((tmp_path / "out" / n).read_text(encoding="utf-8")) for n in draw(outcome, tmp_path / "out"))
    titles = {c.name: c.title for c in outcome.recipe.columns}
    assert titles["accuracy"] in every
    assert titles["accuracy"] in one
    others = [t for n, t in titles.items() if n != "accuracy" and t in every]
    assert others
    assert not any(t in one for t in others)
    tiny.write_text(TINY + bars("acuracy"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"draw\.columns must be one of 'accuracy'.*'acuracy'"):
        load_recipe(tiny)


def _row(title: str, *panels: torch.Tensor) -> _Row:
    return _Row(title, 0, [_Panel(f"{title} {n}", p, [0] * len(p), [1] * len(p)) for n, p in enumerate(panels)])


def test_panels_of_a_row_lie_in_one_plane(monkeypatch):
    """Two panels hold the same twelve points in another order: embedded together, equal features lie on one spot. Where t-SNE puts doubles
    depends on the processor's rounding, so a map stands in for it that puts the first two numbers into a square."""
    embedded = []

    def flat(features, key):
        embedded.append(len(features))
        low, high = features[:, :2].min(0).values, features[:, :2].max(0).values
        return (features[:, :2] - low) / (high - low)
    monkeypatch.setattr("consilience.recipes.draw_models.embed", flat)
    own = rng.normal(rng.key(0, "features"), (12, 5)) * 3
    turned = torch.arange(11, -1, -1)
    rows = [_row("a", own, own[turned]), _row("b", own + 1)]
    caption, points = _embedded(rows, Drawing("features"))
    assert caption == "One t-SNE for: a, 2 panels, 24 points; b, 1 panel, 12 points."
    assert [p.title for p in points] == ["a 0", "a 1", "b 0"]
    assert [len(p.at) for p in points] == [12, 12, 12]
    assert embedded == [24, 12]
    first, second = (torch.tensor(p.at) for p in points[:2])
    assert torch.equal(first, second[turned])
    whole = _embedded(rows, Drawing("features", together="figure"))
    assert whole[0] == "One t-SNE for: all rows, 3 panels, 36 points."
    alone = _embedded(rows, Drawing("features", together="panel"))
    assert alone[0] == "One t-SNE for every panel."
    assert alone[1][2].at == points[2].at                                # a row of one panel is embedded alone either way
    with pytest.raises(ConsilienceError, match=r"features of 5 and 7 numbers cannot be embedded together.*together"):
        _embedded([_row("a", own), _row("b", torch.zeros(12, 7))], Drawing("features", together="figure"))
    assert len(_embedded([_row("a", own), _row("b", torch.rand(12, 7))], Drawing("features"))[1]) == 2


def test_one_client_s_model_on_its_own_and_on_the_others_samples(tiny, tmp_path, monkeypatch):
    """FedBR's Figures 2 and 3: two clients of five digits each. The trained model's answers are counted anew by hand."""
    monkeypatch.setattr("consilience.recipes.draw.SAMPLES", 40)
    halves = TINY.replace('split = "dirichlet(alpha=0.3)"\nclients = 4', 'split = "two_halves"\nclients = 2')
    tiny.write_text(halves + "".join(f'\n[[draw]]\nkind = "{kind}"\nclient = "half"\nmodel = "global"\n{rest}'
                                     for kind, rest in (("features", ""), ("predicted", "sample_class = 8\n"))), encoding="utf-8")
    outcome = reproduce(load_recipe(tiny), tmp_path / "out", Order(("fedavg",), ("accuracy",), 1, 0.5), jobs=1)
    names = draw(outcome, tmp_path / "out")
    assert names == ["figures/1-features-accuracy.svg", "figures/2-predicted-accuracy-all.svg", "figures/2-predicted-accuracy-one.svg"]
    said = below_title((tmp_path / "out" / names[0]).read_text(encoding="utf-8"))
    assert said == ["One t-SNE for: FedAvg, 3 panels, 60 points.", "FedAvg", "the model client0 received, on its own samples",
                        "FedAvg", "the model client0 trained, on its own samples",
                        "FedAvg", "the model client0 trained, on the others' samples"]
    with opened(next(iter(outcome.entries[0].runs.values())).path) as run:
        s = Subject(run.federation, run.data)
        rows = run.data.clients[1].test
        x, _ = run.data.transform(run.data.x[rows], run.data.y[rows], None)
        logits = s.fed.program.network.forward(s.trained.outcomes[0].model, x).logits
        answers = _answers_on_others(s, 0, Drawing("predicted", model="global"), 0)
    assert _shares(answers.predicted, 10) == pytest.approx([float((logits.argmax(1) == c).double().mean()) for c in range(10)])
    assert set(answers.y.tolist()) == {5, 6, 7, 8, 9}                     # the labels that client0 lacks
    # shares by hand: of four answers two are class 0 and one each class 1 and 3
    assert _shares(torch.tensor([0, 3, 0, 1]), 5) == [0.5, 0.25, 0.0, 0.25, 0.0]
    for name, words in ((names[1], {"labels of the samples", "FedAvg", "share of the answers"}), (names[2], {"FedAvg", "probability"})):
        assert words <= set(texts((tmp_path / "out" / name).read_text(encoding="utf-8"))), name


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
