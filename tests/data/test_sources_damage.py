"""Truncated, corrupt and mislabelled files: the message names the file and what was expected."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch
from data_files import idx, image, nifti

from consilience.data.sources import make
from consilience.data.sources._nifti import read_nifti
from consilience.errors import DataError


def fails(name: str, root, *words: str) -> None:
    with pytest.raises(DataError) as error:
        make(name).read(root)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


def test_gzip_cut_off(written):
    root = written("mnist")
    path = root / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    fails("mnist", root, "train-images-idx3-ubyte.gz", "cut off or damaged", "gzip")


def test_idx_shorter_than_its_header_says(written):
    root = written("mnist")
    path = root / "mnist" / "train-images-idx3-ubyte.gz"
    raw = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(raw[:-100]))
    # 16 bytes of header and 20 images of 784 bytes are 15,696.
    fails("mnist", root, "train-images-idx3-ubyte.gz", "20 × 28 × 28", "15696", "15596")


def test_idx_of_another_kind(written):
    root = written("mnist")
    path = root / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes((root / "mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())
    fails("mnist", root, "t10k-labels-idx1-ubyte.gz", "must start with 00000801", "Got 00000803")


def test_label_out_of_range(written):
    root = written("fashion_mnist")
    labels = np.arange(20) % 10
    labels[7] = 10
    idx(root / "fashion-mnist" / "train-labels-idx1-ubyte.gz", labels)
    fails("fashion_mnist", root, "train-labels-idx1-ubyte.gz", "mislabelled", "0 to 9", "Got 10 for sample 7")


def test_images_and_labels_that_do_not_belong_together(written):
    root = written("mnist")
    idx(root / "mnist" / "train-labels-idx1-ubyte.gz", np.arange(19) % 10)
    fails("mnist", root, "20 samples", "19 labels")


def test_writers_of_other_digits(written):
    root = written("mnist")
    np.savez(root / "mnist" / "qmnist_writers.npz", train_writer=np.zeros(20), test_writer=np.zeros(10),
             train_class=np.zeros(20, int), test_class=np.arange(10))
    fails("mnist", root, "qmnist_writers.npz", "differ from the label files")
    np.savez(root / "mnist" / "qmnist_writers.npz", train_writer=np.zeros(3), test_writer=np.zeros(10))
    fails("mnist", root, "train_writer with 20 entries")


@pytest.mark.parametrize(("name", "file", "record"), [("cifar10", "cifar-10-batches-bin/data_batch_2.bin", 3073),
                                                      ("cifar100", "cifar-100-binary/test.bin", 3074)])
def test_cifar_cut_off(name, file, record, written):
    root = written(name)
    raw = (root / file).read_bytes()
    (root / file).write_bytes(raw[:-1])
    fails(name, root, file, f"of {record} bytes", f"Got {len(raw) - 1} bytes")
    (root / file).write_bytes(b"")
    fails(name, root, file, "Got 0 bytes")


def test_cifar_mislabelled(written):
    root = written("cifar10")
    path = root / "cifar-10-batches-bin" / "data_batch_4.bin"
    rows = np.fromfile(path, np.uint8)
    rows[3 * 3073] = 200
    rows.tofile(path)
    fails("cifar10", root, "data_batch_4.bin", "Got 200 for sample 3")


def test_broken_picture(written):
    root = written("pacs")
    (root / "PACS" / "photo" / "dog" / "pic_1.png").write_bytes(b"not a picture")
    fails("pacs", root, "pic_1.png", "cannot be read as an image")


def test_missing_and_empty_class_folders(written):
    root = written("pacs")
    folder = root / "PACS" / "sketch" / "house"
    for path in folder.iterdir():
        path.unlink()
    fails("pacs", root, str(folder), "no image files")
    folder.rmdir()
    fails("pacs", root, "sketch", "class folder 'house'")


def test_tiny_imagenet_unknown_class(written):
    root = written("tiny_imagenet")
    path = root / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    path.write_text("val_0.JPEG\tn77\t0\t0\t1\t1\n")
    fails("tiny_imagenet", root, "Line 1", "'n77'", "wnids.txt")


def test_domainnet_list_names_an_absent_image(written):
    root = written("domainnet")
    (root / "domainnet" / "real" / "zebra" / "real_009_000000.jpg").unlink()
    fails("domainnet", root, "real_train.txt", "real/zebra/real_009_000000.jpg")


def test_har_lines(written):
    root = written("uci_har")
    path = root / "UCI HAR Dataset" / "train" / "Inertial Signals" / "body_gyro_y_train.txt"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]))
    fails("uci_har", root, "body_gyro_y_train.txt", "20 lines", "Got 19")
    path.write_text("\n".join(line.rsplit(" ", 1)[0] for line in lines))
    fails("uci_har", root, "128 finite numbers", "20 × 127")
    path.write_text("\n".join(lines[:3]) + "\nword\n")
    fails("uci_har", root, "body_gyro_y_train.txt", "numbers separated by spaces")


def test_news_rows(written):
    root = written("ag_news")
    path = root / "ag_news" / "test.csv"
    path.write_text(path.read_text() + '"5","title","text"\n')
    fails("ag_news", root, "Row 21", "test.csv", "class from 1 to 4")
    path.write_text("")
    fails("ag_news", root, "test.csv", "empty")


def test_femnist_counts(written):
    root = written("femnist")
    path = root / "femnist" / "data" / "train" / "all_data_0.json"
    document = json.loads(path.read_text())
    document["num_samples"][0] = 13
    path.write_text(json.dumps(document))
    fails("femnist", root, "all_data_0.json", "'f0001_41'", "13 images")
    path.write_text(path.read_text()[:-5])
    fails("femnist", root, "not LEAF's JSON")


def test_davis(written):
    root = written("davis")
    path = root / "davis" / "davis.npz"
    np.savez(path, Y=np.zeros((4, 29)), smiles=np.array(list("abcd")), proteins=np.array(["M"] * 30))
    fails("davis", root, "4 × 30", "(4, 29)")
    np.savez(path, Y=np.zeros((4, 29)))
    fails("davis", root, "lacks smiles, proteins")
    np.savez(path, Y=np.array([{}], dtype=object))
    fails("davis", root, "davis.npz", "pickled", "can run code")
    path.write_bytes(path.read_bytes()[:50])
    fails("davis", root, "not a readable .npz")


def test_bindingdb_columns(written):
    root = written("bindingdb")
    path = root / "bindingdb" / "BindingDB_All.tsv"
    fails("bindingdb(measure=IC50)", root, "'IC50 (nM)'")
    path.write_text(path.read_text().splitlines()[0] + "\n")
    fails("bindingdb", root, "no row")


def test_nifti_reader(tmp_path):
    volume = np.arange(24).reshape(2, 3, 4)         # slices, rows, columns
    for order in "<>":
        for code in (2, 4, 16):
            nifti(tmp_path / "v.nii.gz", volume, order, code)
            assert (read_nifti(tmp_path / "v.nii.gz") == volume).all()
    nifti(tmp_path / "v.nii", volume, slope=2.0)
    assert (read_nifti(tmp_path / "v.nii") == 2 * volume).all()
    raw = (tmp_path / "v.nii").read_bytes()
    (tmp_path / "v.nii").write_bytes(raw[:-1])
    # 352 bytes of header and 24 values of 2 bytes are 400.
    with pytest.raises(DataError, match=r"cut off.*400 bytes.*Got 399"):
        read_nifti(tmp_path / "v.nii")
    (tmp_path / "v.nii").write_bytes(b"\0" * 400)
    with pytest.raises(DataError, match="not a NIfTI-1 volume"):
        read_nifti(tmp_path / "v.nii")


def test_prostate_shapes(written):
    root = written("prostate_mri")
    nifti(root / "prostate_mri" / "HK" / "Case00.nii.gz", np.zeros((12, 380, 384)))
    fails("prostate_mri", root, "Case00.nii.gz", "384 × 384", "(12, 380, 384)")
    (root / "prostate_mri" / "HK" / "Case00.nii.gz").unlink()
    fails("prostate_mri", root, "no image beside it", "Case00.nii.gz")


def test_resizing_keeps_flat_colour(tmp_path):
    from consilience.data.sources._images import read_images

    image(tmp_path / "a.png", 40, 77)
    assert torch.equal(read_images([tmp_path / "a.png"], 32), torch.full((1, 3, 32, 32), 77, dtype=torch.uint8))
