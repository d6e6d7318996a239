"""The real data sets, where CONSILIENCE_DATA (or the operating system) has them: counts, checksums, published protocols."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from consilience.data import directory, load, verify
from consilience.data.sources import make

pytestmark = pytest.mark.real_data


def need(name: str):
    source = make(name)
    if directory.locate(source) is None:
        pytest.skip(f"{name} is not in {directory.data_directory()} (set CONSILIENCE_DATA)")
    return source


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist"])
def test_files_are_the_published_ones(name):
    rows = verify.check_files(need(name))
    assert {r["verdict"] for r in rows} <= {"published", "present"}
    assert any(r["verdict"] == "published" for r in rows)


@pytest.mark.parametrize(("name", "train", "test", "per_class"), [
    ("cifar10", 50000, 10000, [6000] * 10), ("cifar100", 50000, 10000, [600] * 100), ("fashion_mnist", 60000, 10000, [7000] * 10),
    ("mnist", 60000, 10000, [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958])])
def test_counts(name, train, test, per_class):
    data = need(name).read()
    assert len(data.y) == train + test
    assert data.official_test.tolist() == list(range(train, train + test))
    assert data.y.bincount().tolist() == per_class


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist"])
def test_declared_mean_is_that_of_the_training_images(name):
    data = need(name).read()
    x = data.x[: len(data.y) - len(data.official_test)]
    for channel, mean in enumerate(data.mean):
        assert float(x[:, channel].float().mean()) / 255 == pytest.approx(mean, abs=2e-3)


def test_mnist_writers():
    need("mnist")
    data = load("mnist", "by_group(group=writer)")
    if "writer" not in make("mnist").read().groups:
        pytest.skip("qmnist_writers.npz is absent")
    assert data.population == 539
    assert sum(len(torch.cat(c[1:])) for c in data.clients) == 60000


def test_pacs_halves():
    need("pacs")
    data = load("pacs")
    assert data.population == 8
    groups = make("pacs").read().groups["domain"].bincount().tolist()
    assert groups == [2048, 2344, 1670, 3929]


def test_office_has_fedfas_table_11():
    need("office_caltech10")
    data = load("office_caltech10(size=32)")
    assert [[len(r) for r in c[1:]] for c in data.clients] == [[459, 307, 192], [538, 360, 225], [75, 50, 32], [141, 95, 59]]


def test_ag_news():
    need("ag_news")
    data = load("ag_news", "dirichlet(alpha=1.0)", 20, pool="all")
    assert data.x.shape[1] == 200
    assert data.x.dtype == torch.int64
    assert int((data.x[data.clients[0].train] == 1).sum()) == 0         # every word of a training row is known
    assert 30_000 < data.description["vocabulary"]["size"] < 98_635     # PFLlib's number is that of all 127,600 texts
    assert data.y.bincount().min() > 10_000


def test_davis():
    need("davis")
    data = make("davis").read()
    assert len(data.y) == 68 * 442
    assert len(data.official_test) == 5010
    assert data.y.float().mean() == pytest.approx(0.05, abs=0.005)


def test_cifar10_over_100_clients_takes_seconds_and_less_than_a_gibibyte():
    need("cifar10")
    script = """
import resource, sys, time
start = time.perf_counter()
from consilience.data import load
imported = time.perf_counter()
data = load("cifar10", "dirichlet(alpha=0.1)", 100)
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform != "darwin" else 1 << 30)
print(data.population, round(imported - start, 2), round(done - imported, 2), round(peak, 3))
"""
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    population, importing, seconds, peak = map(float, out)
    print(f"cifar10 over 100 clients: {seconds} s after {importing} s of imports; peak {peak} GiB")
    assert population == 100
    assert seconds < 20
    assert peak < 1
