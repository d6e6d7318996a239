"""Where files are looked for, whether they are the published ones, and the download step."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from data_files import mnist_files

from consilience.data import SOURCES, directory, verify
from consilience.data.download import download, fetch
from consilience.data.sources import Download, make
from consilience.errors import DataError


def test_explicit_before_variable_before_default(tmp_path, monkeypatch):
    explicit, variable = tmp_path / "a", tmp_path / "b"
    explicit.mkdir()
    variable.mkdir()
    monkeypatch.setenv("CONSILIENCE_DATA", str(variable))
    assert directory.data_directory(explicit) == explicit
    assert directory.data_directory() == variable
    monkeypatch.delenv("CONSILIENCE_DATA")
    assert directory.data_directory() == directory.user_directory()


@pytest.mark.parametrize(("platform", "variables", "expected"), [
    ("linux", {"XDG_DATA_HOME": "/x"}, "/x/consilience/data"),
    ("linux", {}, "{home}/.local/share/consilience/data"),
    ("darwin", {}, "{home}/Library/Application Support/consilience/data"),
    ("win32", {"LOCALAPPDATA": "/l"}, "/l/consilience/data"),
])
def test_the_users_own_directory(platform, variables, expected, tmp_path, monkeypatch):
    for name in ("XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert str(directory.user_directory()) == expected.format(home=tmp_path)


def test_directories_that_do_not_exist(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="does not exist"):
        directory.data_directory(tmp_path / "none")
    monkeypatch.setenv("CONSILIENCE_DATA", str(tmp_path / "none"))
    with pytest.raises(DataError, match="CONSILIENCE_DATA names"):
        directory.data_directory()


def test_the_data_sets_own_folder_may_be_named(written):
    root = written("cifar10")
    assert len(make("cifar10").read(root / "cifar-10-batches-bin").y) == 120


def test_a_folder_of_another_data_set_is_not_taken(tmp_path):
    """Fashion-MNIST's files have MNIST's names; only the folder's name tells them apart."""
    mnist_files(tmp_path / "fashion-mnist")
    with pytest.raises(DataError, match="mnist"):
        make("mnist").read(tmp_path)
    with pytest.raises(DataError, match="mnist"):
        make("mnist").read(tmp_path / "fashion-mnist")


def test_verdicts(written, monkeypatch):
    root = written("cifar100")
    rows = {r["file"]: r for r in verify.check_files(make("cifar100"), root)}
    assert rows["train.bin"]["verdict"] == "differs"            # 200 images are not the published 50,000
    assert rows["train.bin"]["md5"] == hashlib.md5((root / "cifar-100-binary" / "train.bin").read_bytes()).hexdigest()
    (root / "cifar-100-binary" / "fine_label_names.txt").unlink()
    rows = {r["file"]: r for r in verify.check_files(make("cifar100"), root)}
    assert rows["fine_label_names.txt"]["verdict"] == "absent"
    wanted = SOURCES["cifar100"].files[0]
    found = hashlib.md5((root / "cifar-100-binary" / "train.bin").read_bytes()).hexdigest()
    monkeypatch.setattr(SOURCES["cifar100"], "files", (type(wanted)("train.bin", None, ("0" * 32, found)),))
    assert verify.check_files(make("cifar100"), root)[0]["verdict"] == "published"


def test_where_reads_no_samples(written):
    root = written("mnist")
    (root / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"damaged")
    place = verify.where(make("mnist"), root)
    assert place["found"]
    assert place["folder"] == str(root / "mnist")
    assert verify.where(make("digits"), root)["found"] is True
    assert verify.where(make("folder"), root)["found"] is None
    assert verify.where(make("femnist"), root)["found"] is False


# The download step, from files: urllib reads them as it reads the net.

def packed(kind: str, path: Path) -> Path:
    if kind == "tar":
        with tarfile.open(path, "w:gz") as tar:
            member = tarfile.TarInfo("inside/a.txt")
            member.size = 5
            tar.addfile(member, io.BytesIO(b"hello"))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("inside/a.txt", "hello")
    return path


@pytest.mark.parametrize(("kind", "name"), [("tar", "p.tar.gz"), ("zip", "p.zip")])
def test_archives_are_fetched_checked_and_unpacked(kind, name, tmp_path):
    origin = packed(kind, tmp_path / name)
    base = tmp_path / "data"
    base.mkdir()
    md5 = hashlib.md5(origin.read_bytes()).hexdigest()
    seen: list[tuple[str, int, int]] = []
    fetch(Download(origin.as_uri(), "sub", md5), base, lambda *step: seen.append(step))
    assert (base / "sub" / "inside" / "a.txt").read_text() == "hello"
    whole = origin.stat().st_size
    assert list(dict.fromkeys(what for what, _, _ in seen)) == [name, f"checking {name}", f"unpacking {name}"]
    assert (name, whole, whole) in seen
    origin.unlink()
    (base / "sub" / "inside" / "a.txt").unlink()
    fetch(Download(origin.as_uri(), "sub", md5), base)             # what is there is not fetched again
    assert (base / "sub" / "inside" / "a.txt").exists()


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path):
    origin = tmp_path / "a.csv"
    origin.write_text("x")
    base = tmp_path / "data"
    base.mkdir()
    with pytest.raises(DataError, match=f"MD5 must be {'0' * 32}"):
        fetch(Download(origin.as_uri(), "set/a.csv", "0" * 32), base)
    assert [p for p in base.rglob("*") if p.is_file()] == []


def test_offline_says_where_to_put_the_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot be fetched.*put it at .*set/a\.csv"):
        fetch(Download((tmp_path / "none.csv").as_uri(), "set/a.csv"), tmp_path)


def test_archives_cannot_leave_the_folder(tmp_path):
    origin = tmp_path / "p.tar.gz"
    with tarfile.open(origin, "w:gz") as tar:
        member = tarfile.TarInfo("../../escaped.txt")
        tar.addfile(member, io.BytesIO(b""))
    base = tmp_path / "deep" / "data"
    base.mkdir(parents=True)
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(Download(origin.as_uri(), ""), base)
    assert not list(tmp_path.rglob("escaped.txt"))


def test_sources_without_a_download_step_say_how(tmp_path):
    with pytest.raises(DataError, match=r"no download step.*PACS"):
        download(make("pacs"), tmp_path)


def test_download_of_a_source(tmp_path, monkeypatch):
    mnist_files(tmp_path / "origin")
    items = tuple(Download((tmp_path / "origin" / w.path).as_uri(), f"mnist/{w.path}") for w in SOURCES["mnist"].files[:4])
    monkeypatch.setattr(SOURCES["mnist"], "downloads", items)
    assert len(download(make("mnist"), tmp_path)) == 4
    assert len(make("mnist").read(tmp_path).y) == 30
