"""What cannot be split is refused at once, with the number to change; the number given is one that works."""

from __future__ import annotations

import re
import time

import pytest
import torch

from consilience import rng
from consilience.data import splits
from consilience.data.dataset import Dataset
from consilience.errors import ConfigError, DataError


def made(n=200, classes=10, **more):
    return Dataset("made", torch.zeros(n, 1), torch.arange(n) % classes, classes, **more)


def assign(text, data, clients):
    return splits.make(text).assign(data, torch.arange(len(data.y)), clients, rng.key(0))


@pytest.mark.parametrize("name", ["dirichlet", "quantity"])
def test_too_few_samples_is_known_before_any_draw(name):
    with pytest.raises(DataError, match=r"needs 250 samples, but there are 200: set min_size to at most 8 or the number of clients "
                                        r"to at most 20") as e:
        assign(name, made(), 25)
    assert e.value.exit_code == 2
    assign("iid", made(), 25)


@pytest.mark.parametrize("name", ["dirichlet", "quantity"])
def test_giving_up_names_a_minimum_that_works(name):
    start = time.perf_counter()
    with pytest.raises(DataError, match="in none of 100 tries") as e:
        assign(f"{name}(alpha=0.2, min_size=9)", made(), 20)
    assert time.perf_counter() - start < 5
    found = re.search(r"Set min_size to at most (\d+)", str(e.value))
    if found:
        assign(f"{name}(alpha=0.2, min_size={found[1]})", made(), 20)
    else:
        assert "smallest client with 0. Lower the number of clients" in str(e.value)


def test_dirichlet_advice_is_followed():
    with pytest.raises(DataError, match=r"the best try left the smallest client with (\d+)") as e:
        assign("dirichlet(alpha=0.5, min_size=18)", made(), 10)
    advised = int(re.search(r"Set min_size to at most (\d+)", str(e.value))[1])
    assert 0 < advised < 18
    assert min(map(len, assign(f"dirichlet(alpha=0.5, min_size={advised})", made(), 10).rows)) == advised


def test_more_clients_than_samples():
    for text in ("iid", "client_dirichlet_prior", "client_dirichlet_flat"):
        with pytest.raises(DataError, match="there are 20: set the number of clients to at most 20"):
            assign(text, made(20), 21)


@pytest.mark.parametrize(("text", "clients", "message"), [
    ("dirichlet", None, "needs the number of clients"),
    ("dirichlet", 0, "at least 1"),
    ("two_halves", 3, "makes 2 clients"),
    ("dominant_class", 3, "do not divide the 10 classes"),
    ("dominant_class(own=0, common=0)", 10, "nothing to anyone"),
    ("missing_classes(missing=10)", 10, "missing to at most 9"),
    ("pathological(classes_per_client=11)", 10, "classes_per_client to at most 10"),
    ("two_dominant(first=10)", 2, "classes 0 to 9"),
    ("by_group", None, "has none"),
    ("dirichlet(alpha=0)", 5, "above 0"),
    ("dirichlet(alfa=1)", 5, "Did you mean 'alpha'"),
    ("dirichlett", 5, "Did you mean 'dirichlet'"),
    ("dirichlet(0.1)", 5, "need names"),
    ("two_halves(alpha=0.6)", 2, "at most 0.5"),
])
def test_contradictions(text, clients, message):
    with pytest.raises(ConfigError, match=message):
        assign(text, made(), clients)


@pytest.mark.parametrize(("text", "clients", "message"), [
    ("dominant_class(shard=5)", 10, "cuts 50 shards of 5 .* has 200 samples"),
    ("dominant_class(own=500)", 10, "Lower own or common until own .* is at most 200"),
    ("missing_classes(missing=1)", 250, "Lower the number of clients to at most 222"),
    ("pathological(least=30000)", 20, "Set least to at most"),
    ("pathological", 2000, "Lower the number of clients"),
    ("two_dominant(size=5000)", 2, "Set size to at most"),
])
def test_too_few_of_a_class(text, clients, message):
    data = made(2000)
    with pytest.raises(DataError, match=message) as e:
        assign(text, data, clients)
    size = re.search(r"Set size to at most (\d+)", str(e.value))
    if size:
        assign(f"two_dominant(size={size[1]})", data, 2)
    fewer = re.search(r"clients to at most (\d+)", str(e.value))
    if fewer:
        assign(text, data, int(fewer[1]))
    least = re.search(r"least to at most (\d+)", str(e.value))
    if least:
        assign(f"pathological(least={least[1]})", data, 20)


def test_groups_that_contradict():
    data = made(groups={"writer": torch.arange(200) % 8, "domain": torch.arange(200) % 2})
    with pytest.raises(ConfigError, match="groups domain, writer: say which"):
        assign("by_group", data, None)
    with pytest.raises(ConfigError, match="Did you mean 'writer'"):
        assign("by_group(group=writers)", data, None)
    with pytest.raises(ConfigError, match=r"makes 8 clients .* clients=5 .* by_group\(most=5\)"):
        assign("by_group(group=writer)", data, 5)
    with pytest.raises(ConfigError, match="Lower most or min_size"):
        assign("by_group(group=writer, most=9)", data, None)
    with pytest.raises(DataError, match="Lower min_size"):
        assign("by_group(group=writer, min_size=26)", data, None)
    with pytest.raises(ConfigError, match="makes 4 clients"):
        assign("domain_halves", data, 8)
    with pytest.raises(ConfigError, match="cut to at most 8"):
        assign("domain_halves(cut=9)", data, None)


def test_samples_of_no_group_and_small_groups_are_left_over():
    where = torch.tensor([0] * 5 + [1] * 3 + [-1] * 2)
    data = Dataset("made", torch.zeros(10, 1), torch.zeros(10, dtype=torch.int64), 1, groups={"site": where},
                   group_names={"site": ("north", "south")})
    a = assign("by_group", data, None)
    assert a.names == ["north", "south"]
    assert a.unused.tolist() == [8, 9]
    a = assign("by_group(min_size=4)", data, None)
    assert a.names == ["north"]
    assert a.unused.tolist() == [5, 6, 7, 8, 9]


def test_masks_have_no_label_to_divide_by():
    data = Dataset("scans", torch.zeros(12, 1, 4, 4), torch.zeros(12, 4, 4, dtype=torch.int64), 2,
                   groups={"site": torch.arange(12) % 3}, task="segmentation")
    with pytest.raises(ConfigError, match="a mask per sample"):
        assign("dirichlet", data, 2)
    assert len(assign("by_group", data, None).rows) == 3
    assert len(assign("iid", data, 4).rows) == 4


def test_nothing_to_divide():
    with pytest.raises(DataError, match="no rows"):
        splits.make("iid").assign(made(), torch.zeros(0, dtype=torch.int64), 2, rng.key(0))
