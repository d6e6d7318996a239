"""`consilience data`: listings, checks and pictures, each also as one JSON document."""

from __future__ import annotations

import io
import json
import struct
import zipfile

import numpy as np
import pytest
from typer.testing import CliRunner

from consilience.cli import data as data_commands
from consilience.cli.data import app
from consilience.data import SOURCES, download, statistics, verify
from consilience.data.sources import Download
from consilience.errors import DataError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command; errors come through as they do to `main`."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("CONSILIENCE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str, code: int = 0):
        result = CliRunner().invoke(app, list(arguments))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.stdout

    return call


def write_mnist(folder) -> None:
    folder.mkdir(parents=True)
    for part, n in (("train", 20), ("t10k", 10)):
        for what, array in (("images-idx3", np.zeros((n, 28, 28))), ("labels-idx1", np.arange(n) % 10)):
            raw = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
            (folder / f"{part}-{what}-ubyte").write_bytes(raw)


def test_list(run, tmp_path):
    rows = json.loads(run("list", "--json"))
    assert [r["name"] for r in rows] == sorted(SOURCES)
    by_name = {r["name"]: r for r in rows}
    assert by_name["digits"]["found"] is True
    assert by_name["cifar10"]["found"] is False
    write_mnist(tmp_path / "data" / "mnist")
    text = run("list")
    assert "mnist" in text
    assert str(tmp_path / "data") in text.replace("\n", "")


def test_info(run):
    document = json.loads(run("info", "uci_har", "--json"))
    assert document["name"] == "uci_har"
    assert document["options"][0]["name"] == "transpose"
    assert document["looked_in"]
    text = run("info", "uci_har")
    assert "by_group(group='subject')" in text
    assert "Not found. Looked in" in text
    with pytest.raises(DataError, match="Did you mean 'digits'"):
        run("info", "digit")


def test_check(run, tmp_path):
    document = json.loads(run("check", "digits", "--json"))
    assert document["samples"] == 1797
    assert document["by_class"]["0"] == 178
    assert document["ok"] is True
    write_mnist(tmp_path / "data" / "mnist")
    document = json.loads(run("check", "mnist", "--json"))
    assert document["samples"] == 30
    assert document["test_samples"] == 10
    assert {f["verdict"] for f in document["files"]} == {"present", "absent"}     # unpacked copies have no published checksum
    assert "30 samples of 1 × 28 × 28" in run("check", "mnist")
    with pytest.raises(DataError, match="cifar10"):
        run("check", "cifar10")


def test_what_is_not_printed_to_a_terminal_is_not_folded(run, tmp_path, monkeypatch):
    """As into a file or through grep: a path cut in two is found by nobody."""
    monkeypatch.setenv("COLUMNS", "60")
    write_mnist(tmp_path / "data" / "mnist [old]" / "mnist")
    folder = str(tmp_path / "data" / "mnist [old]")
    assert f"{folder}/mnist/train-images-idx3-ubyte " in run("check", "mnist", "--data-dir", folder)
    assert f"Data directory: {folder}\n" in run("list", "--data-dir", folder)


def test_check_of_a_file_that_is_not_the_published_one(run, tmp_path):
    folder = tmp_path / "data" / "ag_news"
    folder.mkdir()
    for part in ("train", "test"):
        (folder / f"{part}.csv").write_text('"1","a","b c"\n"2","d","e"\n')
    document = json.loads(run("check", "ag_news", "--json", code=2))
    assert document["ok"] is False
    assert "differs" in run("check", "ag_news", code=2)


def test_show(run, tmp_path):
    picture, saved = tmp_path / "split.png", tmp_path / "split.json"
    document = json.loads(run("show", "digits", "--split", "dirichlet(alpha=0.3)", "--clients", "5", "--seed", "3", "--out",
                              str(picture), "--save", str(saved), "--json"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert document["statistics"]["clients"] == 5
    assert document["description"]["seed"] == 3
    again = json.loads(run("show", "digits", "--split-file", str(saved), "--json"))
    assert again["statistics"]["hash"] == document["statistics"]["hash"]
    text = run("show", "digits", "--clients", "30", "--split", "iid")
    assert "10 more clients" in text
    assert "effective classes" in text


def test_show_stops_at_once_when_a_split_cannot_be_met(run):
    with pytest.raises(DataError, match="min_size"):
        run("show", "digits", "--clients", "500")


def test_download_offline(run, monkeypatch, tmp_path):
    monkeypatch.setattr(SOURCES["ag_news"], "downloads", (Download((tmp_path / "none").as_uri(), "ag_news/train.csv"),))
    with pytest.raises(DataError, match="cannot be fetched"):
        run("download", "ag_news")
    origin = tmp_path / "train.csv"
    origin.write_text('"1","a","b"\n')
    monkeypatch.setattr(SOURCES["ag_news"], "downloads", (Download(origin.as_uri(), "ag_news/train.csv"),))
    document = json.loads(run("download", "ag_news", "--json"))
    assert document["files"] == [str(tmp_path / "data" / "ag_news" / "train.csv")]


# ---- in a log, where no bar can be drawn --------------------------------------------------------------------------------

class Slow(io.BytesIO):
    """A transfer that does not end before its first megabyte was told of."""

    headers = {"Content-Length": "2000000"}

    def __init__(self, log, content):
        super().__init__(content)
        self.log = log

    def read(self, size=-1):
        if self.tell() == 1_000_000:
            self.log.wait_for("words.zip · 1.0 MB of 2.0 MB after 0:0")
        return super().read(1_000_000)


def test_a_download_says_in_a_log_how_far_it_is(cli, log, monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / "made.zip", "w") as made:
        made.writestr("train.csv", b"x" * (2_000_000 - 116))           # stored as it is; 116 bytes are the archive's own
    content = (tmp_path / "made.zip").read_bytes()
    assert len(content) == 2_000_000
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(SOURCES["ag_news"], "downloads", (Download("file:///words.zip", "ag_news"),))
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: Slow(log, content))
    unpack = download._unpack

    def slowly(archive, folder):
        log.wait_for("unpacking words.zip after 0:0")
        unpack(archive, folder)
    monkeypatch.setattr(download, "_unpack", slowly)
    assert cli("data", "download", "ag_news", "--data-dir", tmp_path / "data", "--json").json()["name"] == "ag_news"
    assert (tmp_path / "data" / "ag_news" / "train.csv").stat().st_size == 2_000_000 - 116


def test_a_check_says_in_a_log_what_it_does(cli, log, monkeypatch, tmp_path):
    """Checksums are counted in bytes; reading has no end that could be told, but that it goes on can."""
    folder = tmp_path / "data" / "ag_news"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        (folder / f"{part}.csv").write_text('"1","a","b c"\n"2","d","e"\n')
    md5_of, read, contents = verify.md5_of, SOURCES["ag_news"].read, verify.contents

    def checked(path, progress):
        found = md5_of(path, progress)
        if path.name == "train.csv":
            log.wait_for("checksums · 26 bytes of 52 bytes after 0:0")
        return found

    def reading(source, data_dir):
        log.wait_for("reading after 0:0")
        return read(source, data_dir)

    def counting(dataset):
        log.wait_for("counting after 0:0")
        return contents(dataset)
    monkeypatch.setattr(verify, "md5_of", checked)
    monkeypatch.setattr(SOURCES["ag_news"], "read", reading)
    monkeypatch.setattr(verify, "contents", counting)
    assert cli("data", "check", "ag_news", "--data-dir", tmp_path / "data", "--json", code=2).json()["samples"] == 4


def test_showing_a_split_says_in_a_log_what_it_does(cli, log, monkeypatch, tmp_path):
    """None of it has an end that could be told, but that it goes on can."""
    asked = []

    def waiting(do, said):
        def waits(*args, **settings):
            asked.append(said)
            log.wait_for(f"{said} after 0:0")
            return do(*args, **settings)
        return waits
    for place, name, said in ((data_commands, "load", "reading and dividing"), (statistics, "describe", "counting"),
                              (data_commands, "save_split", "saving the split"), (data_commands, "draw_split", "drawing")):
        monkeypatch.setattr(place, name, waiting(getattr(place, name), said))
    shown = cli("data", "show", "digits", "--clients", "3", "--save", tmp_path / "split.json", "--out", tmp_path / "a.svg", "--json").json()
    assert shown["statistics"]["clients"] == 3
    assert asked == ["reading and dividing", "counting", "saving the split", "drawing"]
