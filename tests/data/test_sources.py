"""Every source reads small files in its true format."""

from __future__ import annotations

import dataclasses
import json
import pkgutil

import numpy as np
import pytest
import torch
from data_files import WRITERS, idx, mnist_files
from sklearn.datasets import load_digits

import consilience.data.sources as package
from consilience.data import SOURCES, load
from consilience.data.directory import locate
from consilience.data.sources import digits, make
from consilience.errors import ConfigError, DataError

SHAPES = {
    "mnist": (30, 10, (1, 28, 28)), "fashion_mnist": (30, 10, (1, 28, 28)), "femnist": (34, 7, (1, 28, 28)),
    "cifar10": (120, 20, (3, 32, 32)), "cifar100": (300, 100, (3, 32, 32)), "cinic10": (40, 20, (3, 32, 32)),
    "tiny_imagenet": (16, 4, (3, 64, 64)), "pacs": (84, 0, (3, 32, 32)), "uci_har": (30, 10, (9, 1, 128)),
    # A fifth of each domain's 20 is test; the lists of ten classes hold 30, int(0.8 · 30) = 24 of them training.
    "office_caltech10": (80, 16, (3, 256, 256)), "domainnet": (180, 36, (3, 256, 256)),
    # 6 slices per site, int(0.2 · 6) = 1 of them test.
    "prostate_mri": (36, 6, (3, 384, 384)), "ag_news": (100, 20, (200,)), "davis": (120, 2, (1100,)),
    # 77 rows cover 7 × 11 pairs once each (7 and 11 are coprime), and one pair was measured twice.
    "bindingdb": (78, 0, (1100,)),
}


def test_every_module_is_a_source_and_its_name_is_the_modules():
    modules = {m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")} - {"base"}
    assert modules == set(SOURCES)
    for name, source in SOURCES.items():
        assert source.name == name
        assert source.__module__.endswith(f".{name}")
        assert source.__doc__
        assert source.title


def test_every_source_that_reads_files_has_a_writer_here():
    assert {n for n, s in SOURCES.items() if s.folders} == set(WRITERS) == set(SHAPES)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_reads_true_format(name, written):
    data = make(name).read(written(name))
    n, n_test, shape = SHAPES[name]
    assert tuple(data.x.shape) == (n, *shape)
    assert len(data.official_test) == n_test
    assert data.x.dtype == {"uci_har": torch.float32, "ag_news": torch.int64, "davis": torch.int64,
                            "bindingdb": torch.int64}.get(name, torch.uint8)
    assert int(data.y.max()) < data.classes
    assert all(len(v) == n for v in data.groups.values())
    assert data.name == name


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_one_line_makes_clients(name, written):
    """The default split works on every source, and no row is given to two clients or to two parts."""
    few = {"femnist": None, "mnist": 2, "fashion_mnist": 2, "davis": 2, "tiny_imagenet": 1, "cinic10": 2, "bindingdb": 2,
           "cifar10": 4, "ag_news": 4}
    split = "iid" if few.get(name) else None
    data = load(name, split, few.get(name), data_dir=written(name))
    rows = torch.cat([torch.cat(c[1:]) for c in data.clients])
    assert len(rows.unique()) == len(rows)
    assert not torch.isin(rows, data.test).any()
    assert all(len(c.train) for c in data.clients)
    json.dumps(data.description)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_absent_files_are_named_with_every_place_and_a_way(name, data_root, monkeypatch):
    monkeypatch.setattr(SOURCES[name], "system_folders", ())
    with pytest.raises(DataError) as error:
        make(name).read(data_root)
    message = str(error.value)
    assert all(str(data_root / folder) in message for folder in SOURCES[name].folders)
    assert "How to get it" in message
    if name != "femnist":       # two formats: its message names the first file of the chosen one
        assert repr(SOURCES[name].files[0].path) in message


def test_one_missing_file_is_the_one_named(written):
    root = written("cifar10")
    (root / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"'data_batch_3\.bin' was not found"):
        make("cifar10").read(root)


def test_unknown_names_offer_the_nearest():
    with pytest.raises(DataError, match="Did you mean 'cifar10'"):
        make("cifar_10")
    with pytest.raises(ConfigError, match="Did you mean 'transpose'"):
        make("uci_har(transposed=false)")


# What the pixels and numbers mean.

def test_digits_are_scaled_to_bytes():
    data = make("digits").read()
    assert data.x.shape == (1797, 1, 8, 8)
    assert data.x.dtype == torch.uint8
    # The first row of the first digit is 0 0 5 13 9 1 0 0 of 16; 255/16 · 5 = 79.7 → 80, · 13 = 207.2, · 9 = 143.4, · 1 = 15.9.
    assert data.x[0, 0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert int(data.x.max()) == 255


@pytest.mark.parametrize("there", [True, False])
def test_digits_are_those_that_scikit_learn_loads(monkeypatch, there):
    """They are read from its file without it; where a version keeps the file elsewhere, it is asked."""
    if not there:
        monkeypatch.setattr(digits, "find_spec", lambda name: None)
    for mine, theirs in zip(digits._read(), load_digits(return_X_y=True)):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)


def test_mnist_without_gz_and_writers(data_root):
    mnist_files(data_root / "mnist")
    for path in (data_root / "mnist").glob("*.gz"):
        import gzip

        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    data = make("mnist").read(data_root)
    assert data.x[3, 0, 0, 0] == 3
    assert data.groups == {}


def test_mnist_by_writer(written):
    data = load("mnist", "by_group(group=writer)", data_dir=written("mnist"), test="both")
    assert [c.name for c in data.clients] == ["writer0", "writer1", "writer2", "writer3"]       # writer 4 wrote test digits only
    assert len(data.test) == 10


def test_cifar_planes(written):
    x = make("cifar10").read(written("cifar10")).x
    assert x[0, 0].unique().tolist() == [10]
    assert x[25, 0].unique().tolist() == [11]           # the second batch
    assert x[119, 0].unique().tolist() == [15]          # the test batch comes last
    assert x[0, 1].unique().tolist() == [100]
    assert x[0, 2, 5].tolist() == list(range(32))       # rows of 32, not columns


def test_cifar100_fine_and_coarse(written):
    root = written("cifar100")
    fine, coarse = make("cifar100").read(root), make("cifar100(labels=coarse)").read(root)
    assert fine.classes == 100
    assert coarse.classes == 20
    assert torch.equal(fine.y // 5, coarse.y)
    assert torch.equal(fine.groups["coarse"], coarse.y)


def test_har_transpose_and_the_released_reshape(written):
    root = written("uci_har")
    right, released = make("uci_har").read(root).x, make("uci_har(transpose=false)").read(root).x
    # Signal s at time t holds s + t/1000.
    assert right[0, 4, 0, 17] == pytest.approx(4.017)
    # Reshaped from (time, signal): flat place 17 holds time 17 // 9 = 1, signal 17 % 9 = 8.
    assert released[0, 0, 0, 17] == pytest.approx(8.001)
    data = load("uci_har", data_dir=root)
    assert data.population == 6             # subjects 1–4 and 5–6: both published parts are divided
    assert data.description["pool"] == "all"


def test_prostate_is_prepared_as_fedfa_does(written):
    data = make("prostate_mri").read(written("prostate_mri"))
    # Slice i holds 100 i (site 0): smallest 0, 99th percentile of twelve equal slices is 1100. Slice 3: 300/1100 · 255 = 69.5 → 69.
    assert data.x[0, :, 0, 0].tolist() == [int(200 / 1100 * 255), int(300 / 1100 * 255), int(400 / 1100 * 255)]
    assert data.y[0].sum() == 100                       # a mask of 10 × 10; value 2 became 1
    assert data.y[0, 100:110, 50:60].all()
    assert int(data.y.max()) == 1
    # 6 slices: train int(max(0.6 · 6, 32)) is cut to the 4 that one validation and one test slice leave.
    assert data.roles.bincount().tolist() == [24, 6, 6]
    fed = load(data, train=0.5)                         # a Dataset itself is a source; its one group makes the clients
    assert fed.task == "segmentation"
    assert [c.name for c in fed.clients] == ["BIDMC", "HK", "I2CVB", "BMC", "RUNMC", "UCL"]


def test_office_parts_have_fedfas_counts(written):
    data = load("office_caltech10(size=16)", data_dir=written("office_caltech10"))
    # 20 images: test ceil(4) = 4, of the other 16 int(0.6 · 16) = 9 train and 7 validate.
    assert [[len(r) for r in c[1:]] for c in data.clients] == [[9, 7, 4]] * 4


def test_domainnet_lists(written):
    root = written("domainnet")
    drawn = load("domainnet(size=8)", data_dir=root)
    # 30 images of the ten classes, 24 in the training list: int(0.8 · 0.4 · 24) = 7 train, int(0.2 · 24) = 4 validate, 6 test.
    assert [[len(r) for r in c[1:]] for c in drawn.clients] == [[7, 4, 6]] * 6
    official = make("domainnet(size=8, lists=official)").read(root)
    assert (official.roles == 2).sum() == 60            # each list of 10 test images, six domains
    assert drawn.clients[0].name == "clipart"


def test_cinic_valid_part(written):
    root = written("cinic10")
    assert len(make("cinic10").read(root).y) == 40
    assert len(make("cinic10(valid=train)").read(root).y) == 60
    assert make("cinic10(valid=published)").read(root).roles.bincount().tolist() == [20, 20, 20]
    assert make("cinic10").read(root).groups["origin"].bincount().tolist() == [20, 20]


def test_tiny_imagenet_classes_are_sorted_and_named(written):
    data = make("tiny_imagenet").read(written("tiny_imagenet"))
    assert data.class_names == ("goldfish", "salamander")
    assert data.x[data.y == 0][0, 0, 0, 0] == 40        # n01's images


def test_femnist_writers_and_emnist(written, data_root):
    root = written("femnist")
    data = make("femnist").read(root)
    assert data.group_names["writer"] == ("f0001_41", "f0002_10")
    assert data.x[1].unique().tolist() == [255]         # 1.0 in the file
    with pytest.raises(DataError, match="emnist-byclass-train-images"):
        make("femnist(format=emnist)").read(root)
    (data_root / "empty" / "femnist").mkdir(parents=True)
    assert locate(make("femnist"), root) is not None
    assert locate(make("femnist"), data_root / "empty") is None         # a folder without a file of any format
    images = np.zeros((4, 28, 28))
    images[:, 3, 7] = 9
    for part in ("train", "test"):
        idx(data_root / "emnist" / "gzip" / f"emnist-byclass-{part}-images-idx3-ubyte.gz", images)
        idx(data_root / "emnist" / "gzip" / f"emnist-byclass-{part}-labels-idx1-ubyte.gz", np.array([0, 61, 3, 4]))
    upright = make("femnist(format=emnist)").read(data_root)
    assert upright.x[0, 0, 7, 3] == 9                   # EMNIST stores images on their side


def test_pairs(written):
    davis = make("davis").read(written("davis"))
    assert davis.y.bincount().tolist() == [90, 30]      # Kd 5 < 30 nM for the first drug only
    # SMILES numbers start at 1 in the order #%()*+-./0123456789:=@A…; 'C' is the 25th, '1' the 11th, '=' the 21st, 'N' the 36th.
    assert davis.x[30, :5].tolist() == [25, 11, 21, 36, 0]
    assert davis.x[29, 100:104].tolist() == [1, 26, 0, 0]       # 'AZ'
    assert davis.groups["target"][:31].tolist() == [*range(30), 0]
    assert int(davis.x.max()) < davis.vocabulary


def test_bindingdb_rows_and_threshold(written):
    root = written("bindingdb")
    assert make("bindingdb").read(root).y[-1] == 0                      # √(4 · 900) = 60 nM
    assert make("bindingdb(threshold=61)").read(root).y[-1] == 1


def test_bindingdb_with_numbered_chains(data_root):
    header = ["Ligand SMILES", "Kd (nM)", "Number of Protein Chains in Target (>1 implies a multichain complex)",
              "BindingDB Target Chain Sequence 1", "BindingDB Target Chain Sequence 2"]
    rows = [["CC", "5", "1", "ABC", ""], ["CC", "5", "2", "ABC", "DEF"]]
    (data_root / "bindingdb").mkdir()
    (data_root / "bindingdb" / "BindingDB_All.tsv").write_text("\n".join("\t".join(r) for r in [header, *rows]))
    data = make("bindingdb").read(data_root)
    assert data.x[:, 100:104].tolist() == [[1, 2, 3, 0]]


def test_synthetic_dials():
    data = make("synthetic(samples=4000, clients=4, classes=5, label_skew=0.1, feature_shift=3.0, quantity_skew=0.5)").read()
    client = data.groups["client"]
    sizes = client.bincount()
    assert int(sizes.sum()) == 4000
    assert int(sizes.max()) > 2 * int(sizes.min())
    means = torch.stack([data.x[client == c].mean(0) for c in range(4)])
    assert (means[0] - means[1]).norm() > 5             # about 3 · √(2 · 32) = 24 between two offsets, less what labels add
    plain = make("synthetic(samples=4000, clients=4)").read()
    assert plain.groups["client"].bincount().tolist() == [1000] * 4
    assert make("synthetic(size=8)").read().x.shape == (2000, 1, 8, 8)
    assert not torch.equal(make("synthetic").read().x, make("synthetic(seed=1)").read().x)
    assert torch.equal(make("synthetic").read().x, make("synthetic").read().x)
    with pytest.raises(ConfigError, match="cannot share 3 samples"):
        make("synthetic(samples=3)").read()


def test_noise_zero_puts_samples_on_their_centres():
    data = make("synthetic(noise=0.0, samples=50, classes=2)").read()
    assert len(data.x.unique(dim=0)) == 2


def test_source_text_round_trips():
    source = make("uci_har(transpose=false)")
    assert source.text == "uci_har(transpose=False)"
    assert make(source.text) == source
    assert dataclasses.is_dataclass(source)
