"""Files of users that are not as they should be: what would silently train something else is refused, with the place and the cure."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from data_files import image

from consilience.data import from_arrays, load
from consilience.data.sources import make
from consilience.errors import DataError

HEAD = "age,bp,ward,dx\n"


def refused(name: str, *words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DataError) as caught:
            make(name).read()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def table(tmp_path, text: str, encoding: str = "utf-8") -> str:
    path = tmp_path / "wards.csv"
    path.write_text(text, encoding=encoding)
    return f'table(path="{path}", label=dx, client=ward)'


@pytest.mark.parametrize(("text", "words"), [
    (HEAD + "50,120,north,ill\n60,110,north,\n", ("row 2 has no label", "Fill it in")),
    (HEAD + "50,120,north,ill\n60,110,,well\n70,100,,ill\n", ("row 2 and 1 more has no client",)),
    ("age,age,ward,dx\n1,2,north,ill\n", ("two columns 'age'",)),
    (",bp,ward,dx\n0,2,north,ill\n", ("Column 1", "row index", "drop=")),
    (HEAD.replace(",", ";") + "1;2;north;ill\n", ("separator=';'",)),
    (HEAD + "1e39,2,north,ill\n", ("'1e39' in row 1", "3.4e38")),
    (HEAD.replace(",", ";") + "1,5;2;north;ill\n", ("Line 2", "separator=';'")),
    (HEAD + "1,2,north,ill\n1,2,\"north,ill\n3,4,south,well\n", ("begins in line 3 ", "quotation mark")),
    ("", ("is empty",)), (HEAD, ("has a header and no rows",)),
])
def test_tables(tmp_path, text, words):
    refused(table(tmp_path, text), *words)


def test_tables_in_other_encodings_and_places(tmp_path):
    refused(table(tmp_path, HEAD + "50,120,Köln,ill\n", "latin-1"), "UTF-8", "iconv -f latin1")
    refused(table(tmp_path, HEAD + "50,120,Köln,ill\n", "utf-16"), "UTF-16", "iconv -f utf-16")
    for start, words in ((b"PK\x03\x04", "Excel workbook"), (b"\xd0\xcf\x11\xe0", "Excel workbook"), (b"\x1f\x8b", "gunzip"),
                         (b"PAR1", ".parquet")):
        spec = table(tmp_path, "")
        (tmp_path / "wards.csv").write_bytes(start + b"\x00\x9f")
        refused(spec, "wards.csv", words)
    (tmp_path / "wards" / "north.csv").mkdir(parents=True)
    refused(f'table(path="{tmp_path / "wards"}", label=dx)', "north.csv", "Is a directory")


def test_tables_with_a_decimal_comma(tmp_path):
    """As spreadsheets write them where numbers have one."""
    spec = table(tmp_path, "age;bp;ward;dx\n50,5;-1,25;north;ill\n60;1e1;south;well\n").removesuffix(")")
    refused(f"{spec}, separator=';')", "'50,5' in row 1", "decimal=','")
    assert load(f"{spec}, separator=';', decimal=',')", test="clients").x.tolist() == [[50.5, -1.25], [60.0, 10.0]]
    spec = table(tmp_path, "age;bp;ward;dx\n1.234;1;north;ill\n").removesuffix(")")
    refused(f"{spec}, separator=';', decimal=',')", "'1.234' in row 1")          # a thousand and some, or a little more than one
    refused(f"{spec}, separator=';;')", "one character", "';;'")


def test_labels_that_are_missing_in_memory():
    x = np.zeros((3, 2), np.float32)
    for y in (["a", None, "b"], ["a", "", "b"], ["a", float("nan"), "b"]):
        with pytest.raises(DataError, match="row 2 has no label"):
            from_arrays(x, np.array(y, object))
    with pytest.raises(DataError, match="row 1 has no client"):
        from_arrays(x, [0, 1, 0], np.array([np.nan, 1, 1]))


@pytest.mark.parametrize(("x", "words"), [
    (np.full((2, 3), 1e300), "float32"),                                    # finite as float64, infinite when it is trained on
    (np.zeros((2, 1, 4, 4), np.int16), "whole numbers are taken for tokens"),
    (np.zeros((2, 1, 4, 4), np.uint16), "astype"),
    (np.array([[0, 1], [2, -1]]), "count from 0"),
    (np.array([["1", "2"], ["3", "4"]]), "must be numbers"),
    (np.zeros((2, 0), np.float32), "none of them empty"),
])
def test_samples_that_no_model_could_take(x, words):
    with pytest.raises(DataError, match=words):
        from_arrays(x, [0, 1])


def test_unsigned_numbers_are_tokens():
    assert from_arrays(np.array([[0, 65535]], np.uint16), [0]).x.tolist() == [[0, 65535]]


def test_a_place_is_named_once(tmp_path):
    with pytest.raises(DataError) as caught:
        make('arrays(path="none.npz")').read(".")
    assert str(caught.value).count("none.npz") == 2                        # as it was given, and where it was looked for


def test_one_array_alone(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    refused(f'arrays(path="{tmp_path / "x.npy"}")', "one array", "np.savez")


def test_masks_make_a_segmentation():
    x = np.zeros((4, 1, 6, 5), np.uint8)
    y = np.arange(4)[:, None, None] % 3 * np.ones((4, 6, 5), np.uint8)
    data = load(from_arrays(x, y, [0, 0, 1, 1]), train=0.5)
    assert (data.task, data.classes, data.population) == ("segmentation", 3, 2)
    assert torch.equal(data.y, torch.from_numpy(y).long())
    assert torch.equal(from_arrays(x, y[:, None]).y, data.y)                # a channel of their own does no harm
    assert from_arrays(x, np.zeros((4, 6, 5)), classes=2).classes == 2      # a site without foreground


def test_masks_that_do_not_fit():
    x = np.zeros((4, 1, 6, 5), np.uint8)
    with pytest.raises(DataError, match="Got the values 0, 255"):
        from_arrays(x, np.where(np.arange(4)[:, None, None] == 1, 255, 0) * np.ones((4, 6, 5), int))
    with pytest.raises(DataError, match=r"\(4, 6, 6\).*do not fit"):
        from_arrays(x, np.zeros((4, 6, 6), int))
    with pytest.raises(DataError, match="argmax"):
        from_arrays(np.zeros((4, 2), np.float32), np.eye(4))


def test_files_that_are_no_images_are_left_out(tmp_path):
    for ward in ("north", "south"):
        for k, dx in enumerate(("ill", "well")):
            image(tmp_path / ward / dx / "1.png", 8, k)
    (tmp_path / "north" / "ill" / "._1.png").write_bytes(b"\0\5\26\7")          # what a Mac leaves on other systems' disks
    (tmp_path / "north" / "ill" / "more.png").mkdir()
    assert len(make(f'folder(path="{tmp_path}")').read().y) == 4
    (tmp_path / "west" / "ill").mkdir(parents=True)
    (tmp_path / "west" / "ill" / "1.dcm").write_bytes(b"DICM")
    refused(f'folder(path="{tmp_path}")', "west", "holds no images", "move the folder away")


def test_deep_images_are_not_cut_off(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    for dx in ("ill", "well"):
        (tmp_path / dx).mkdir()
        image_module.fromarray(np.full((4, 4), 3000, np.uint16)).save(tmp_path / dx / "1.png")
    refused(f'folder(path="{tmp_path}")', "more than 8 bits", "arrays(path=")


def test_images_too_large_to_open(tmp_path, monkeypatch):
    image_module = pytest.importorskip("PIL.Image")
    for dx in ("ill", "well"):
        image(tmp_path / dx / "1.png", 8, 1)
    monkeypatch.setattr(image_module, "MAX_IMAGE_PIXELS", 10)                  # 64 pixels are more than twice as many: Pillow refuses
    refused(f'folder(path="{tmp_path}", size=4)', "1.png", "exceeds limit")
    refused(f'folder(path="{tmp_path}")', "1.png", "exceeds limit")


@pytest.mark.parametrize("tops", [("train", "val"), ("test", "train", "valid"), ("Testing", "Training"), ("Train",),
                                  ("test", "train", "x")])
def test_parts_of_a_data_set_are_no_clients(tmp_path, tops):
    for top in tops:
        for k, dx in enumerate(("ill", "well")):
            image(tmp_path / top / dx / "1.png", 8, k)
    refused(f'folder(path="{tmp_path}")', f"{tops[0]}/", "taken for", "parts of a data set" if len(tops) > 1 else "a part of a data set",
            *(["validation=0.1"] if {"val", "valid"} & {*tops} else []))
    if len(tops) == 1:
        assert len(make(f'folder(path="{tmp_path / "Train"}")').read().y) == 2


def test_classes_and_wards_may_be_called_like_parts(tmp_path):
    for k, name in enumerate(("dev", "test")):
        image(tmp_path / "classes" / name / "1.png", 8, k)
        image(tmp_path / "wards" / ("test" if k else "north") / name / "1.png", 8, k)
    assert make(f'folder(path="{tmp_path / "classes"}")').read().class_names == ("dev", "test")
    assert make(f'folder(path="{tmp_path / "wards"}")').read().group_names["domain"] == ("north", "test")


def test_tables_called_as_parts_of_a_data_set(tmp_path):
    for name in ("train", "val"):
        (tmp_path / f"{name}.csv").write_text("age,dx\n50,ill\n60,well\n")
    refused(f'table(path="{tmp_path}", label=dx)', "train.csv and val.csv", "taken for clients", "one table")


@pytest.mark.parametrize(("rows", "line"), [
    ('50,120,north,ill\n60,110,north,"ill\n70,100,south,well\n80,90,south,ill\n', 3),            # takes the rest of the file
    ('50,120,north,ill\n60,110,north,"ill\n70,100,south,well\n80,90,south,"ill\n', 3),           # takes two rows
    ('50,120,"north" 1,ill\n', 2), ('50,120,"two\nlines",ill\n60,110,"north,ill\n', 4)])
def test_an_open_quotation_mark_takes_no_rows(tmp_path, rows, line):
    refused(table(tmp_path, HEAD + rows), f"begins in line {line} ", "quotation mark not closed")


def test_quoted_values_after_a_space(tmp_path):
    data = make(table(tmp_path, HEAD + '50, 120, "north, 1", "ill"\n60, 110, "south", well\n')).read()
    assert (data.class_names, data.group_names["client"]) == (("ill", "well"), ("north, 1", "south"))


def test_codes_with_an_underscore_are_no_numbers(tmp_path):
    refused(table(tmp_path, HEAD + "12_3,120,north,ill\n"), "'12_3' in row 1", "categories='age'")
    assert make(table(tmp_path, HEAD + "1,2,north,1_2\n1,2,north,12\n")).read().class_names == ("12", "1_2")


def test_whole_numbers_are_one_class_however_written(tmp_path):
    for name, values in (("east", "1 0"), ("west", "1.0 0.0")):          # a column that once had gaps is written with a point
        rows = "".join(f"{k},{dx}\n" for k, dx in enumerate(values.split()))
        (tmp_path / f"{name}.csv").write_text(f"age,dx\n{rows}")
    data = make(f'table(path="{tmp_path}", label=dx)').read()
    assert (data.classes, data.y.tolist()) == (2, [1, 0, 1, 0])
    assert make(table(tmp_path, HEAD + "1,2,north,1.5\n1,2,north,1.0\n")).read().class_names == ("1.0", "1.5")


def test_samples_that_were_computed_with_gradients_are_data():
    assert not from_arrays(torch.rand(4, 3, requires_grad=True), [0, 1, 0, 1]).x.requires_grad
