"""Small files in the true format of every data set, written into a data directory."""

from __future__ import annotations

import csv
import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

Writer = Callable[[Path], None]
WRITERS: dict[str, Writer] = {}


def writer(function: Writer) -> Writer:
    WRITERS[function.__name__] = function
    return function


def idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def image(path: Path, size: int, value: int) -> None:
    Image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), value, np.uint8)).save(path)


def mnist_files(folder: Path, n: int = 20, m: int = 10) -> None:
    for part, count in (("train", n), ("t10k", m)):
        images = np.arange(count)[:, None, None] + np.zeros((count, 28, 28))
        idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        idx(folder / f"{part}-labels-idx1-ubyte.gz", np.arange(count) % 10)


@writer
def mnist(root: Path) -> None:
    mnist_files(root / "mnist")
    np.savez(root / "mnist" / "qmnist_writers.npz", train_writer=np.arange(20, dtype=np.int16) // 5,
             test_writer=np.full(10, 4, np.int16), train_class=np.arange(20) % 10, test_class=np.arange(10))


@writer
def fashion_mnist(root: Path) -> None:
    mnist_files(root / "fashion-mnist")


@writer
def femnist(root: Path) -> None:
    for part, users in (("train", {"f0001_41": 12, "f0002_10": 15}), ("test", {"f0001_41": 3, "f0002_10": 4})):
        data = {u: {"x": [[(i % 2) / 1.0] * 784 for i in range(n)], "y": [i * 5 % 62 for i in range(n)]} for u, n in users.items()}
        path = root / "femnist" / "data" / part / "all_data_0.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"users": list(users), "num_samples": list(users.values()), "user_data": data}))


@writer
def cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for b, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        rows = np.zeros((20, 3073), np.uint8)
        rows[:, 0] = np.arange(20) % 10
        rows[:, 1:1025] = 10 + b            # red
        rows[:, 1025:2049] = 100            # green
        rows[:, 2049:] = np.arange(1024) % 32       # blue: the column
        rows.tofile(folder / name)
    (folder / "batches.meta.txt").write_text("airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n")


@writer
def cifar100(root: Path) -> None:
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name, n in (("train.bin", 200), ("test.bin", 100)):
        rows = np.zeros((n, 3074), np.uint8)
        rows[:, 1] = np.arange(n) % 100
        rows[:, 0] = rows[:, 1] // 5
        rows[:, 2:] = 7
        rows.tofile(folder / name)
    (folder / "fine_label_names.txt").write_text("\n".join(f"fine{i}" for i in range(100)))
    (folder / "coarse_label_names.txt").write_text("\n".join(f"coarse{i}" for i in range(20)))


@writer
def cinic10(root: Path) -> None:
    for p, part in enumerate(("train", "valid", "test")):
        for c in ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"):
            image(root / "cinic-10" / part / c / f"cifar10-{part}-1.png", 32, 50 * p)
            image(root / "cinic-10" / part / c / "n02692877_19.png", 32, 50 * p + 1)


@writer
def tiny_imagenet(root: Path) -> None:
    folder = root / "tiny-imagenet-200"
    ids = ["n02", "n01"]
    for i in ids:
        for k in range(6):
            image(folder / "train" / i / "images" / f"{i}_{k}.JPEG", 64, 40 if i == "n01" else 200)
    for k in range(4):
        image(folder / "val" / "images" / f"val_{k}.JPEG", 64, 90)
    (folder / "wnids.txt").write_text("\n".join(ids))
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tsalamander\nn99\tother")
    (folder / "val" / "val_annotations.txt").write_text("".join(f"val_{k}.JPEG\t{ids[k % 2]}\t0\t0\t62\t62\n" for k in range(4)))


@writer
def pacs(root: Path) -> None:
    for d, domain in enumerate(("art_painting", "cartoon", "photo", "sketch")):
        for c in ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"):
            for k in range(3):
                image(root / "PACS" / domain / c / f"pic_{k}.png", 40, 10 * d)


@writer
def office_caltech10(root: Path) -> None:
    names = ("back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug", "projector")
    for domain in ("amazon", "caltech", "dslr", "webcam"):
        for c in names:
            for k in range(2):
                image(root / "office_caltech_10" / domain / c / f"frame_{k}.jpg", 30, 120)


@writer
def domainnet(root: Path) -> None:
    folder = root / "domainnet"
    classes = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
    for domain in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"):
        lines: dict[str, list[str]] = {"train": [f"{domain}/aircraft_carrier/{domain}_001_000001.jpg 0"], "test": []}
        for n, c in enumerate(classes):
            for k in range(3):
                file = f"{domain}/{c}/{domain}_{n:03}_{k:06}.jpg"
                image(folder / file, 20, 60)
                lines["test" if k == 2 else "train"].append(f"{file} {n}")
        for part, text in lines.items():
            (folder / f"{domain}_{part}.txt").write_text("\n".join(text) + "\n")


def nifti(path: Path, volume: np.ndarray, order: str = "<", code: int = 4, slope: float = 0.0) -> None:
    """A NIfTI-1 file of `volume` (slices, rows, columns)."""
    header = bytearray(352)
    struct.pack_into(order + "i", header, 0, 348)
    struct.pack_into(order + "8h", header, 40, 3, *volume.shape[::-1], 1, 1, 1, 1)
    struct.pack_into(order + "h", header, 70, code)
    struct.pack_into(order + "3f", header, 108, 352.0, slope, 0.0)
    header[344:348] = b"n+1\0"
    kind = {2: "u1", 4: "i2", 16: "f4"}[code]
    raw = bytes(header) + np.ascontiguousarray(volume).astype(order + kind).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@writer
def prostate_mri(root: Path) -> None:
    for s, site in enumerate(("BIDMC", "HK", "I2CVB", "BMC", "RUNMC", "UCL")):
        volume = np.arange(12)[:, None, None] * 100 + np.zeros((12, 384, 384)) + s
        mask = np.zeros((12, 384, 384))
        mask[[0, 3, 4, 5, 6, 7, 8, 11], 100:110, 50:60] = 2         # the first and last slice are skipped: 6 remain
        nifti(root / "prostate_mri" / site / "Case00.nii.gz", volume)
        nifti(root / "prostate_mri" / site / "Case00_segmentation.nii.gz", mask, code=2)


@writer
def uci_har(root: Path) -> None:
    folder = root / "UCI HAR Dataset"
    for part, n, first in (("train", 20, 1), ("test", 10, 5)):
        (folder / part / "Inertial Signals").mkdir(parents=True)
        (folder / part / f"y_{part}.txt").write_text("".join(f"{i % 6 + 1}\n" for i in range(n)))
        (folder / part / f"subject_{part}.txt").write_text("".join(f"{first + i // 5}\n" for i in range(n)))
        for s, kind in enumerate(("body_acc", "body_gyro", "total_acc")):
            for a, axis in enumerate("xyz"):
                line = " ".join(f"{(3 * s + a) + t / 1000: .7e}" for t in range(128))      # signal number + time / 1000
                (folder / part / "Inertial Signals" / f"{kind}_{axis}_{part}.txt").write_text((line + "\n") * n)


@writer
def ag_news(root: Path) -> None:
    folder = root / "ag_news"
    folder.mkdir(parents=True)
    for part, n in (("train", 80), ("test", 20)):
        with (folder / f"{part}.csv").open("w", newline="") as file:
            rows = csv.writer(file, quoting=csv.QUOTE_ALL)
            for i in range(n):
                rows.writerow([i % 4 + 1, f"Title {part}", f'It\'s "news" no. {i}: word{i}, (again)'])


@writer
def davis(root: Path) -> None:
    (root / "davis").mkdir(parents=True)
    kd = np.full((4, 30), 10000, np.float32)
    kd[0] = 5
    np.savez(root / "davis" / "davis.npz", Y=kd, smiles=np.array(["CC", "C1=N", "O", "N#C"]), test_fold=np.array([7, 3]),
             proteins=np.array(["MKK"] * 29 + ["AZ"]), drug_ids=np.array(list("abcd")),
             protein_ids=np.array([f"p{i}" for i in range(30)]))


@writer
def bindingdb(root: Path) -> None:
    (root / "bindingdb").mkdir(parents=True)
    header = ["BindingDB Reactant_set_id", "Ligand SMILES", "Ki (nM)", "Kd (nM)",
              "Number of Protein Chains in Target (>1 implies a multichain complex)", "BindingDB Target Chain  Sequence"]
    rows = [[str(i), f"C{'C' * (i % 7)}O", "", ("> 10000" if i % 2 else " 10"), "1", "mkv" + "A" * (i % 11)] for i in range(77)]
    rows += [["x", "CO", "", "", "1", "MKV"], ["x", "CO", "", "1", "2", "MKV"], ["x", "", "", "1", "1", "MKV"]]     # unused
    rows += [["x", "N", "", "4", "1", "M"], ["x", "N", "", "900", "1", "M"]]    # geometric mean 60: no binding
    (root / "bindingdb" / "BindingDB_All.tsv").write_text("\n".join("\t".join(r) for r in [header, *rows]) + "\n")
