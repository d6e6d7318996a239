"""The global test set in every client's shift."""

from __future__ import annotations

import pytest
import torch

from consilience.data import geometry
from consilience.errors import ConfigError
from consilience.metrics.registry import make_measures
from consilience.metrics.subject import Subject
from consilience.runs.config import RunConfig
from consilience.runs.run import build_federation, load_data


def test_every_client_scores_the_test_set_turned_its_own_way():
    """Client i turns images by 90·i degrees, so its score is that of the plain test set turned by hand."""
    s = _with_test_rows()
    measured = make_measures(["shifted_test"])[0].measure(s)
    x, y = s.data.x[s.data.test], s.data.y[s.data.test]
    for i, name in enumerate(s.names):
        turned, _ = s.data.transform(geometry.rotate(x, torch.tensor(90.0 * i)), y, None)
        logits = s.fed.program.network.forward(s.fed.model, turned).logits
        assert measured["per_client"][name] == pytest.approx(float((logits.argmax(1) == y).float().mean()))
    scores = list(measured["per_client"].values())
    assert measured["mean"] == pytest.approx(sum(scores) / 3)
    assert measured["worst"] == min(scores)


def _with_test_rows() -> Subject:
    """Digits have no published test set: the last rows of a client are taken for one, as they were before the shift."""
    config = RunConfig.make({"data": "digits", "clients": 3, "split": "iid", "shift": "rotation(step=90)"})
    data = load_data(config)
    plain = load_data(config.replace(shift=None))
    rows = torch.cat([c.test for c in plain.clients])
    x = data.x.clone()
    x[rows] = plain.x[rows]
    data = type(data)(**{**{f: getattr(data, f) for f in data.__dataclass_fields__}, "x": x, "test": rows})
    fed = build_federation(config, data)
    fed.round()
    return Subject(fed, data)


def test_a_draw_per_image_stays_the_client_s_own():
    s = _with_test_rows()
    s.data.description["shift"] = "drawn_rotation(concentration=0.01)"
    first = make_measures(["shifted_test"])[0].measure(s)
    assert first == make_measures(["shifted_test"])[0].measure(s)
    assert len(set(first["per_client"].values())) > 1


@pytest.mark.parametrize(("text", "angles"), [("shifted_test(angles=3)", (0.0, 90.0, 180.0)),
                                              ("shifted_test(angles=[0, 30.5])", (0.0, 30.5))])
def test_one_copy_of_the_test_set_for_every_angle(text, angles):
    """A number counts from 0 by the step of the clients' shift, here 90 degrees."""
    s = _with_test_rows()
    measured = make_measures([text])[0].measure(s)
    x, y = s.data.x[s.data.test], s.data.y[s.data.test]
    expected = {}
    for angle in angles:
        turned, _ = s.data.transform(geometry.rotate(x, torch.tensor(angle)), y, None)
        logits = s.fed.program.network.forward(s.fed.model, turned).logits
        expected[f"{angle:g}"] = float((logits.argmax(1) == y).double().mean())
    assert measured["per_angle"] == pytest.approx(expected)
    assert measured["mean"] == pytest.approx(sum(expected.values()) / len(angles))
    assert measured["worst"] == pytest.approx(min(expected.values()))
    assert expected[measured["worst_angle"]] == pytest.approx(measured["worst"])


def test_angles_do_not_ask_for_the_clients_shift():
    """FedBR's CIFAR-10 draws an angle for every image of a client; its balanced test sets have one angle each, 15 degrees apart."""
    s = _with_test_rows()
    s.data.description["shift"] = "drawn_rotation(concentration=0.1)"
    one = make_measures(["shifted_test(angles=10)"])[0]
    assert list(one.measure(s)["per_angle"]) == [str(15 * i) for i in range(10)]
    s.data.description["shift"] = None
    assert one.why_not(s) is None
    for wrong in ("shifted_test(angles=0)", "shifted_test(angles=[])"):
        with pytest.raises(ConfigError, match="at least one angle"):
            make_measures([wrong])


def test_without_a_test_set_or_a_shift_it_says_why():
    config = RunConfig.make({"data": "digits", "clients": 3, "split": "iid"})
    data = load_data(config)
    s = Subject(build_federation(config, data), data)
    assert "no global test set" in (make_measures(["shifted_test"])[0].why_not(s) or "")
    s = _with_test_rows()
    s.data.description["shift"] = None
    assert "not shifted" in (make_measures(["shifted_test"])[0].why_not(s) or "")
