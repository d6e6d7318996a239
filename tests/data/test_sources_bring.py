"""What users bring: folders, arrays, tables, other libraries' files."""

from __future__ import annotations

import re
import subprocess
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from data_files import image
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience
from consilience.data import from_arrays, load
from consilience.data.dataset import in_columns
from consilience.data.sources import make
from consilience.data.sources._bring import numbered
from consilience.errors import ConfigError, DataError


def fails(name: str, *words: str, error: type[Exception] = DataError) -> None:
    with pytest.raises(error) as caught:
        make(name).read()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_class_folders(tmp_path):
    for c, value in (("dog", 10), ("cat", 20)):
        for k in range(3):
            image(tmp_path / "photos" / c / f"{k}.png", 12, value)
    data = make(f'folder(path="{tmp_path / "photos"}")').read()
    assert data.class_names == ("cat", "dog")
    assert data.x.shape == (6, 3, 12, 12)
    assert data.x[data.y == 1].unique().tolist() == [10]
    assert data.groups == {}
    assert data.name == "photos"


def test_domain_folders_make_clients(tmp_path):
    for d in ("rome", "oslo"):
        for c in ("cat", "dog") if d == "rome" else ("dog",):       # a domain may lack classes
            for k in range(4):
                image(tmp_path / d / c / f"{k}.png", 12, 1)
    data = load(f'folder(path="{tmp_path}", size=8, grey=true)')
    assert [c.name for c in data.clients] == ["oslo", "rome"]
    assert data.x.shape == (12, 1, 8, 8)
    assert data.classes == 2


def test_train_and_test_folders(tmp_path):
    for part, n in (("train", 4), ("test", 2)):
        for c in ("cat", "dog"):
            for k in range(n):
                image(tmp_path / part / c / f"{k}.png", 12, 1)
    data = load(f'folder(path="{tmp_path}")', "iid", 2, test="global")
    assert len(data.test) == 4
    assert sum(len(c.train) for c in data.clients) == 8


def test_folder_errors(tmp_path):
    fails("folder", "needs to know where", error=ConfigError)
    fails('folder(path="no/such/place")', "no/such/place", "does not exist")
    fails(f'folder(path="{tmp_path}")', "no images")
    image(tmp_path / "cat" / "0.png", 12, 1)
    image(tmp_path / "oslo" / "dog" / "0.png", 12, 1)
    fails(f'folder(path="{tmp_path}")', "cat/", "oslo/", "not both")


def test_path_is_also_looked_for_in_the_data_directory(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1])
    assert len(make('arrays(path="mine.npz")').read(tmp_path).y) == 4


def test_arrays_with_clients_and_test(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.random.default_rng(0).random((10, 3)), y=np.arange(10) % 2, client=np.array(list("aabbbccccc")),
             test=np.arange(10) == 9)
    data = load(f'arrays(path="{path}")', test="both", train=0.5)
    assert [c.name for c in data.clients] == ["a", "b", "c"]
    assert data.test.tolist() == [9]
    assert data.x.dtype == torch.float32
    assert data.name == "mine"


def test_arrays_errors(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)))
    fails(f'arrays(path="{tmp_path / "a.npz"}")', "arrays x and y", "holds x")
    (tmp_path / "a.npz").write_bytes(b"PATIENT;AGE\n1;44\n")               # NumPy takes what it does not know for a pickle
    fails(f'arrays(path="{tmp_path / "a.npz"}")', "not a readable .npz file", "another kind of file")
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=[0, 1])
    fails(f'arrays(path="{tmp_path / "a.npz"}")', "3 samples but 2 labels")
    np.savez(tmp_path / "a.npz", x=[[0, 1], [2, np.nan]], y=[0, 1])
    fails(f'arrays(path="{tmp_path / "a.npz"}")', "row 2 has features that are not finite")
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)), y=[0.5, 1])
    fails(f'arrays(path="{tmp_path / "a.npz"}")', "labels must be classes")
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)), y=[0, 7])
    fails(f'arrays(path="{tmp_path / "a.npz"}", classes=5)', "0 to 4")


def test_layouts_of_bytes():
    assert from_arrays(np.zeros((4, 9, 7), np.uint8), [0, 1, 0, 1]).x.shape == (4, 1, 9, 7)
    assert from_arrays(np.zeros((4, 9, 7, 3), np.uint8), [0, 1, 0, 1]).x.shape == (4, 3, 9, 7)
    assert from_arrays(np.zeros((4, 3, 9, 7), np.uint8), [0, 1, 0, 1]).x.shape == (4, 3, 9, 7)
    assert from_arrays(torch.zeros(4, 5, dtype=torch.int32), torch.tensor([0, 1, 0, 1])).x.dtype == torch.int64


def test_labels_are_kept_or_numbered():
    assert from_arrays(np.zeros((3, 1)), [2, 0, 1]).y.tolist() == [2, 0, 1]
    gaps = from_arrays(np.zeros((3, 1)), [10, 2, 10])
    assert gaps.y.tolist() == [1, 0, 1]
    assert gaps.class_names == ("2", "10")
    assert from_arrays(np.zeros((3, 1)), ["b", "a", "b"]).y.tolist() == [1, 0, 1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.integers(-50, 50), st.text("abc1", max_size=3)), min_size=1, max_size=30))
def test_numbering_is_dense_and_faithful(values):
    numbers, names = numbered(values)
    assert sorted(set(numbers.tolist())) == list(range(len(set(values))))
    assert all(names[n] == str(v) for n, v in zip(numbers.tolist(), values))


def test_table_by_client(tmp_path):
    path = tmp_path / "wards.csv"
    path.write_text("id,age,dose,hospital,outcome\n1,30,0.5,north,ill\n2,41,1.5,south,well\n3,50,2,north,well\n4,20,1,south,ill\n")
    data = load(f'table(path="{path}", label=outcome, client=hospital, drop=id)', train=0.5)
    assert [c.name for c in data.clients] == ["north", "south"]
    assert data.x.tolist() == [[30, 0.5], [41, 1.5], [50, 2], [20, 1]]
    assert data.y.tolist() == [0, 1, 1, 0]                  # ill, well


def test_a_folder_of_tables_has_a_client_for_every_file(tmp_path):
    wards = tmp_path / "wards"
    wards.mkdir()
    (wards / "south.csv").write_text("age,dose,outcome\n30,0.5,ill\n41,1.5,well\n")
    (wards / "north.csv").write_text("outcome,dose,age\nwell,2,50\nill,1,20\nill,3,33\n")          # the same columns in another order
    (wards / ".north.csv.swp").write_text("")
    data = make(f'table(path="{wards}", label=outcome)').read()
    assert data.name == "wards"
    assert data.group_names["client"] == ("north", "south")
    assert data.groups["client"].tolist() == [0, 0, 0, 1, 1]
    assert data.x.tolist() == [[2, 50], [1, 20], [3, 33], [0.5, 30], [1.5, 41]]             # columns as in the first file, north.csv
    assert data.y.tolist() == [1, 0, 0, 0, 1]                                               # ill, well
    (wards / "south.csv").write_text("age,dose,outcome\n30,0.5,ill\n41,1.5,\n")
    fails(f'table(path="{wards}", label=outcome)', "south.csv: row 2 has no label")
    (wards / "south.csv").write_text("age,weight,outcome\n30,0.5,ill\n41,1.5,well\n")
    fails(f'table(path="{wards}", label=outcome)', "north.csv", "south.csv must have the same columns", "'dose', 'weight'",
          "drop=(dose, weight)")
    data = make(f'table(path="{wards}", label=outcome, drop=(dose, weight))').read()          # each is in one file alone
    assert data.feature_names == ("age",)
    assert data.x.tolist() == [[50], [20], [33], [30], [41]]
    fails(f'table(path="{wards}", label=outcome, drop=(dose, wait))', "has no column 'wait'")
    (wards / "north.pq").write_bytes(b"")
    fails(f'table(path="{wards}", label=outcome)', "two files of the client 'north'")
    (tmp_path / "empty").mkdir()
    fails(f'table(path="{tmp_path / "empty"}", label=outcome)', "holds no .csv or .parquet files")


def test_a_bare_path_is_told_how_it_can_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for text, said in (("mine.npz", 'arrays(path="mine.npz")'), ("a/wards.CSV", 'table(path="a/wards.CSV", label=…)'),
                       ("photos", 'folder(path="photos")')):
        with pytest.raises(ConfigError, match=re.escape(said)):
            make(text)
    (tmp_path / "digits").mkdir()
    assert make("digits").name == "digits"            # a data set's name is not taken for the folder


WARDS = "hospital,age,sex,bp,outcome\na,30,M,120,0\na,40,F,,1\na,50,F,130,0\nb,60,M,NA,0\nb,20,,100,1\n"


def test_categories_are_features_of_their_own_and_gaps_the_client_s_mean(tmp_path):
    path = tmp_path / "wards.csv"
    path.write_text(WARDS)
    data = make(f'table(path="{path}", label=outcome, client=hospital, categories=sex, missing=mean)').read()
    assert data.feature_names == ("age", "sex=F", "sex=M", "bp")
    # bp: a has 120 and 130, so 125 for its gap; b has 100 alone. The last row's sex is missing, and neither
    assert data.x.tolist() == [[30, 0, 1, 120], [40, 1, 0, 125], [50, 1, 0, 130], [60, 0, 1, 100], [20, 0, 0, 100]]
    whole = make(f'table(path="{path}", label=outcome, drop=(hospital, sex), missing=mean)').read()
    assert whole.x[:, 1].tolist() == pytest.approx([120, 350 / 3, 130, 350 / 3, 100])              # nobody owns a row: the mean of all


def test_categories_and_gaps_are_not_guessed(tmp_path):
    path = tmp_path / "wards.csv"
    path.write_text(WARDS)
    table = f'table(path="{path}", label=outcome, client=hospital'
    fails(f"{table})", "Column 'sex'", "'M' in row 1", "categories='sex'")
    fails(f"{table}, drop=sex)", "Column 'bp'", "'' in row 2", "missing='mean'")
    fails(f"{table}, categories=sex, drop=bp)", "Column 'sex'", "no value in row 5 (got '')", "missing='mean'", "drop='sex'")
    fails(f"{table}, categories=(sex, wing))", "no column 'wing'")
    path.write_text("sex,outcome\n,0\nNA,1\n")
    fails(f'table(path="{path}", label=outcome, categories=sex, missing=mean)', "no column left to be a feature: 'sex' has no value")
    path.write_text(WARDS.replace("F,130", "None,130"))
    fails(f"{table}, categories=sex, drop=bp)", "no value in row 3 (got 'None')")            # as it stands in the file
    path.write_text(WARDS.replace("100", "?"))
    fails(f"{table}, categories=sex, missing=mean)", "Column 'bp' has no value in any row of 'b'")


def test_columns_of_categories_are_found_by_their_values(tmp_path):
    path = tmp_path / "new.csv"
    path.write_text("sex,age,label\nF,30,0\nF,40,1\n")
    data = make(f'table(path="{path}", categories=sex)').read()
    agreed = in_columns(data, ("age", "sex=F", "sex=M"), "The data", "the run was trained on")
    assert agreed.x.tolist() == [[30, 1, 0], [40, 1, 0]]                      # no man among them
    with pytest.raises(DataError, match=r"have 'sex=F', a value that is not among those the run was trained on: sex=M, sex=W"):
        in_columns(data, ("age", "sex=M", "sex=W"), "The data", "the run was trained on")
    plain = make(f'table(path="{path}", drop=sex)').read()
    with pytest.raises(DataError, match="have no column 'sex=F'"):           # without categories it is a column like any other
        in_columns(plain, ("age", "sex=F"), "The data", "the run was trained on")


def test_table_errors(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,label\n1,x,0\n2,3,1\n")
    fails(f'table(path="{path}")', "Column 'b'", "'x' in row 1", "drop='b'")
    fails(f'table(path="{path}", label=lable)', "no column 'lable'", "'label'")
    path.write_text("age,dose,died\n1,2,0\n2,3,1\n")
    fails(f'table(path="{path}")', "no column 'label'. Say which column holds the class", "There are: age, dose, died.")
    path.write_text("a,label\n1,0\n2\n")
    fails(f'table(path="{path}")', "Line 3", "2 columns", "Got 1")
    path.write_text("")
    fails(f'table(path="{path}")', "empty")


def test_parquet_is_like_csv(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"a": [1.0, 2.0, 3.0], "label": [0, 1, 0], "who": ["x", "y", "x"]}), tmp_path / "t.parquet")
    data = make(f'table(path="{tmp_path / "t.parquet"}", client=who)').read()
    assert data.x.tolist() == [[1], [2], [3]]
    assert data.group_names["client"] == ("x", "y")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 not")
    fails(f'table(path="{tmp_path / "t.parquet"}")', "not a readable Parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    fails(f'table(path="{tmp_path / "t.parquet"}")', "consilience[tables]")


def write_pfllib(root, save) -> None:
    for part, n in (("train", 6), ("test", 2)):
        (root / part).mkdir(parents=True)
        for client in (0, 1, 10):
            save(root / part / f"{client}.npz", np.full((n, 1, 4, 4), client, np.float32), np.arange(n) % 2)


def test_pfllib_folders(tmp_path):
    write_pfllib(tmp_path, lambda path, x, y: np.savez(path, x=x, y=y))
    data = load(f'pfllib(path="{tmp_path}")')
    assert [c.name for c in data.clients] == ["client0", "client1", "client10"]
    assert [[len(r) for r in c[1:]] for c in data.clients] == [[6, 0, 2]] * 3
    assert data.x[data.clients[2].test].unique().tolist() == [10]


def test_pfllib_pickles_are_refused_and_the_given_command_converts_them(tmp_path):
    write_pfllib(tmp_path, lambda path, x, y: np.savez_compressed(path, data={"x": x, "y": y}))
    with pytest.raises(DataError, match="pickled dictionary") as error:
        make(f'pfllib(path="{tmp_path}")').read()
    command = str(error.value).split('python -c "')[1].rstrip('"')
    subprocess.run([sys.executable, "-c", command], check=True)
    assert len(make(f'pfllib(path="{tmp_path}")').read().y) == 24


def test_huggingface_from_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"]),
                                  "who": datasets.Value("string")})
    part = datasets.Dataset.from_dict({"text": ["good day", "bad day", "day"], "label": [1, 0, 1], "who": ["a", "b", "a"]},
                                      features=features)
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "hf"))
    data = make(f'huggingface(path="{tmp_path / "hf"}", x=text, client=who, tokens=4)').read()
    assert data.x.shape == (6, 4)
    assert data.class_names == ("no", "yes")
    assert data.official_test.tolist() == [3, 4, 5]
    numbers = datasets.Dataset.from_dict({"v": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]})
    numbers.save_to_disk(str(tmp_path / "numbers"))
    assert make(f'huggingface(path="{tmp_path / "numbers"}", x=v)').read().x.tolist() == [[1, 2], [3, 4]]
    fails(f'huggingface(path="{tmp_path / "numbers"}", x=w)', "no column 'w'")


def test_huggingface_images(tmp_path):
    datasets, image_of = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    pictures = [image_of.fromarray(np.full((6, 6, 3), v, np.uint8)) for v in (10, 20)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({"image": pictures, "label": [0, 1]}, features=features).save_to_disk(str(tmp_path / "hf"))
    data = make(f'huggingface(path="{tmp_path / "hf"}", size=4)').read()
    assert data.x.shape == (2, 3, 4, 4)
    assert data.x.flatten(1).unique(dim=1).tolist() == [[10], [20]]


def test_huggingface_errors(monkeypatch):
    fails("huggingface", "either path", error=ConfigError)
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails('huggingface(dataset="x")', "consilience[huggingface]")


def test_flamby_through_its_package(monkeypatch):
    """FLamby is not on an index; a module with its interface stands in for it."""

    class FedToyHeart:
        def __init__(self, center, train, pooled):
            assert not pooled
            self.center, self.n = center, 4 if train else 2

        def __len__(self):
            return self.n

        def __getitem__(self, i):
            return torch.full((3,), float(self.center)), torch.tensor([float(i % 2)])

    module = types.ModuleType("flamby.datasets.fed_toy_heart")
    module.FedToyHeart, module.NUM_CLIENTS = FedToyHeart, 2
    for name, value in (("flamby", types.ModuleType("flamby")), ("flamby.datasets", types.ModuleType("flamby.datasets")),
                        ("flamby.datasets.fed_toy_heart", module)):
        monkeypatch.setitem(sys.modules, name, value)
    data = load("flamby(dataset=fed_toy_heart)")
    assert [c.name for c in data.clients] == ["centre0", "centre1"]
    assert [[len(r) for r in c[1:]] for c in data.clients] == [[4, 0, 2]] * 2
    assert data.x[data.clients[1].train].unique().tolist() == [1]
    fails("flamby(dataset=fed_other)", "cannot import flamby.datasets.fed_other")
    fails("flamby", "needs the name", error=ConfigError)


def test_what_a_notebook_asks_for_first_is_at_the_top():
    assert consilience.load is load
    assert consilience.from_arrays is from_arrays


def test_pictures_with_a_transparent_palette_are_read_in_silence(tmp_path):
    """Pillow warns of every kind of transparency that it leaves out; the colours are the palette's all the same."""
    picture = pytest.importorskip("PIL.Image").new("P", (4, 4))
    picture.putpalette([10, 20, 30, 40, 50, 60])
    picture.putpixel((1, 0), 1)
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        picture.save(tmp_path / kind / "a.png", transparency=bytes([255, 128]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = make(f"folder(path='{tmp_path}')").read().x
    assert x[0, :, 0, :2].tolist() == [[10, 40], [20, 50], [30, 60]]
