"""A site's data: every adapter, labels that mean the same everywhere, and strict errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from consilience import rng
from consilience.errors import ConfigError, ConsilienceError, DataError
from consilience.federation.site import describe_site, join_sites, load_site


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def arrays(name="site.npz", n=20, y=None, **more):
    x = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
    np.savez(name, x=x, y=np.arange(n) % 3 if y is None else y, **more)
    return f"arrays(path='{name}')"


def test_arrays_and_the_keyed_cut():
    """75 % of 20 rows train, 10 % validate, what is left tests: 15, 2, 3; drawn from the seed."""
    data = load_site(arrays())
    rows = data.clients[0]
    assert [len(r) for r in rows[1:]] == [15, 2, 3]
    order = rng.permutation(rng.key(0, "data", "parts", 0), 20)
    assert rows.train.tolist() == sorted(order[:15].tolist())
    assert sorted(torch.cat(list(rows[1:])).tolist()) == list(range(20))
    other = load_site("arrays(path='site.npz', seed=1)").clients[0]
    assert other.train.tolist() != rows.train.tolist()
    assert len(load_site("arrays(path='site.npz', train=0.5, validation=0.25)").clients[0].test) == 5


def test_rows_set_apart_for_testing_are_the_test_part():
    test = np.zeros(20, bool)
    test[[3, 7]] = True
    rows = load_site(arrays(test=test)).clients[0]
    assert rows.test.tolist() == [3, 7]
    assert len(rows.val) == 1                          # ⌊0.1 · 18⌋
    assert len(rows.train) == 17


def test_a_site_that_lacks_a_class_keeps_the_numbers():
    y = np.array([0, 2] * 10)                          # class 1 is missing: 2 must stay 2
    data = load_site(arrays(y=y), classes=3)
    assert data.y.tolist() == y.tolist()
    assert data.classes == 3
    with pytest.raises(DataError, match="0 to 1"):
        load_site("arrays(path='site.npz')", classes=2)


def test_words_that_each_site_would_number_by_itself_are_refused():
    with open("texts.py", "w") as file:
        file.write("""import torch
from consilience.data.text import TextDataset, number_words
def load():
    x, words = number_words(["fever and cough", "cough"], 4)
    return TextDataset("texts", x, torch.tensor([0, 1]), 2, words=words)
""")
    with pytest.raises(DataError, match="Agree on a vocabulary"):
        load_site("texts:load")


def test_text_labels_follow_the_agreed_order():
    with open("t.csv", "w") as file:
        file.write("a,b,dx\n" + "".join(f"{i},{i * 2},{'well' if i % 2 else 'ill'}\n" for i in range(10)))
    spec = "table(path='t.csv', label='dx')"
    data = load_site(spec, class_names=("unknown", "well", "ill"))
    assert data.y.tolist() == [1 if i % 2 else 2 for i in range(10)]
    assert data.classes == 3
    with pytest.raises(DataError, match="must agree on their order"):
        load_site(spec)
    seen = describe_site(load_site(spec, alone=True))                   # for a look, before an app says how they are numbered
    assert seen["class_names"] == ["ill", "well"]
    assert sum(seen["training_labels"]) == seen["train"]
    assert "class_names" not in describe_site(data)
    with pytest.raises(DataError, match="'ill'"):
        load_site(spec, class_names=("well", "sick"))


def test_columns_follow_the_agreed_order():
    with open("t.csv", "w") as file:
        file.write("ward,b,a,dx\n" + "".join(f"{i % 3},{i * 2},{i},{i % 2}\n" for i in range(10)))
    spec = "table(path='t.csv', label='dx')"
    assert load_site(spec, feature_names=("a", "b")).x.tolist() == [[i, i * 2] for i in range(10)]       # the ward is left out
    with pytest.raises(DataError, match=r"have no column 'age', which the federation agreed on\. Its columns: a, age"):
        load_site(spec, feature_names=("a", "age"))
    np.savez("s.npz", x=np.zeros((10, 2), np.float32), y=np.arange(10) % 2)
    assert load_site("arrays(path='s.npz')", feature_names=("a", "b")).x.shape == (10, 2)                  # arrays have no names


def test_folder_of_images():
    image = pytest.importorskip("PIL.Image")
    for place, name in enumerate(("cat", "dog")):
        for i in range(4):
            Path("photos", name).mkdir(parents=True, exist_ok=True)
            image.fromarray(np.full((8, 8, 3), 40 * place + i, np.uint8)).save(f"photos/{name}/{i}.png")
    data = load_site("folder(path='photos')", class_names=("cat", "dog"))
    assert data.x.shape == (8, 3, 8, 8)
    assert data.y.tolist() == [0] * 4 + [1] * 4


def test_entry_points(tmp_path):
    (tmp_path / "ward.py").write_text(
        "import numpy as np\n"
        "from consilience.data import Dataset\n"
        "import torch\n"
        "def pair(n=8):\n    return np.zeros((n, 2), np.float32), np.array([0, 2] * (n // 2))\n"
        "def ready():\n    return Dataset('mine', torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), 2, roles=torch.tensor([0, 0, 1, 2]))\n"
        "def wrong():\n    return 3\n")
    data = load_site("ward:pair(n=12, train=0.5, validation=0.0)")
    assert data.y.tolist() == [0, 2] * 6
    assert [len(r) for r in data.clients[0][1:]] == [6, 0, 6]
    rows = load_site("ward:ready").clients[0]
    assert [r.tolist() for r in rows[1:]] == [[0, 1], [2], [3]]
    with pytest.raises(DataError, match="must give"):
        load_site("ward:wrong")
    with pytest.raises(ConfigError, match="'pair'"):
        load_site("ward:pairs")
    with pytest.raises(ConfigError, match="could not be called"):
        load_site("ward:pair(m=3)")


@pytest.mark.parametrize(("spec", "said"), [
    ("arays(path='x')", "'arrays'"), ("arrays(path='absent.npz')", "does not exist"), ("arrays", "path"),
    ("arrays(path='site.npz', train=0.8, validation=0.5)", "more than 1"), ("arrays(path='site.npz', train=2)", "fraction"),
    ("arrays(path='site.npz', seed='x')", "whole number"), ("arrays(path='site.npz', colour=1)", "no option"),
    ("nowhere.at.all:load", "no Python module"), ("arrays(path=", "written name"), ("digits", "adapter"),
])
def test_what_is_wrong_is_said(spec, said):
    arrays()
    with pytest.raises(ConsilienceError, match=said):
        load_site(spec)


def test_pickled_arrays_are_not_read():
    np.savez("site.npz", x=np.array([{"a": 1}] * 4, dtype=object), y=np.zeros(4))
    with pytest.raises(DataError, match="pickled"):
        load_site("arrays(path='site.npz')")


def test_joined_sites_are_a_simulation_of_the_same_rows():
    sites = [load_site(arrays(f"{i}.npz", n)) for i, n in enumerate((20, 12))]
    whole = join_sites(sites)
    for site, client in zip(sites, whole.clients):
        for own, there in zip(site.clients[0][1:], client[1:]):
            assert torch.equal(site.x[own], whole.x[there])
            assert torch.equal(site.y[own], whole.y[there])


def test_description():
    about = describe_site(load_site(arrays()))
    assert about["sample"] == [3]
    assert about["input"] == "float32"
    assert sum(about["training_labels"]) == about["train"] == 15


def test_a_slip_in_how_the_rows_are_cut_is_told_by_the_nearest_name():
    with pytest.raises(ConfigError, match=r"has no option 'tain'\. Did you mean 'train'"):
        load_site("arrays(path='a.npz', tain=0.9)", number=0)
