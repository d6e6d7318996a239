"""Certificates and keys that would let a server or a site wait for ever are named before anything starts."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from consilience.errors import ConfigError, DataError
from consilience.federation import certificates
from consilience.federation.certificates import NodeKey, ServerFiles, expires, make_certificates, make_key
from consilience.federation.launch import Launcher
from consilience.federation.trust import check_authority, check_node_key, check_server, ends_soon, read_by_others


@pytest.fixture
def files(tmp_path: Path) -> ServerFiles:
    return make_certificates(tmp_path / "c", ["hub.example.org"])


@pytest.fixture
def made_at(monkeypatch: pytest.MonkeyPatch):
    """Certificates as they would have been made some days from now."""
    def at(days: int) -> None:
        later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        clock = SimpleNamespace(now=lambda zone: later)
        monkeypatch.setattr(certificates, "datetime", SimpleNamespace(datetime=clock, timedelta=datetime.timedelta, UTC=datetime.UTC))
    return at


def test_what_is_just_made_passes(files: ServerFiles, tmp_path: Path) -> None:
    assert check_server(files) is files
    assert ends_soon(files) is None
    check_authority(files.authority)
    check_node_key(make_key(tmp_path / "s"))


def test_a_certificate_that_has_ended(files: ServerFiles, made_at, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_at(-40)
    make_certificates(files.folder, ["hub"], days=10, again=True)
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"server.crt' ended on .*--again"):
        Launcher(tmp_path / "server", certificates=files)
    assert not (tmp_path / "server").exists()


def test_a_certificate_of_tomorrow(files: ServerFiles, made_at, monkeypatch: pytest.MonkeyPatch) -> None:
    made_at(1)
    make_certificates(files.folder, ["hub"], again=True)
    monkeypatch.undo()
    with pytest.raises(DataError, match="Is the clock right"):
        check_server(files)


def test_none_outlives_its_authority(files: ServerFiles, made_at, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites believe the authority for ten years. A server's certificate that says more would be refused before its own end, without a
    warning in the month before.
    """
    for days in (3651, 10**9):                                             # the second is beyond the calendar
        with pytest.raises(ConfigError, match=r"at most 3650 days"):
            make_certificates(tmp_path / "other", ["hub"], days=days)
    assert not (tmp_path / "other").exists()
    longest = make_certificates(tmp_path / "longest", ["hub"], days=3650)
    assert expires(longest.certificate) == expires(longest.authority)
    before = files.certificate.read_bytes()
    made_at(3600)
    with pytest.raises(ConfigError, match=r"at most 50 days.*a new authority in an empty folder"):
        make_certificates(files.folder, ["hub"], again=True)
    assert files.certificate.read_bytes() == before
    make_certificates(files.folder, ["hub"], days=50, again=True)
    assert expires(files.certificate) == expires(files.authority)
    made_at(3651)
    with pytest.raises(ConfigError, match=r"at most 0 days"):
        make_certificates(files.folder, ["hub"], days=1, again=True)


def test_one_that_ends_soon_is_told(files: ServerFiles) -> None:
    make_certificates(files.folder, ["hub"], days=12, again=True)
    assert check_server(files) is files
    assert "--again" in str(ends_soon(files))


def test_files_of_two_certificates(files: ServerFiles, tmp_path: Path) -> None:
    other = make_certificates(tmp_path / "d", ["hub.example.org"])
    shutil.copy(other.key, files.key)
    with pytest.raises(DataError, match=r"server.key' does not belong to .*server.crt'"):
        check_server(files)
    shutil.copy(other.certificate, files.certificate)
    with pytest.raises(DataError, match=r"ca.crt' did not sign .*server.crt'"):
        check_server(files)
    files.key.write_text("nonsense")
    with pytest.raises(DataError, match="not a private key"):
        check_server(files)


def test_an_authority_that_is_none(files: ServerFiles, tmp_path: Path) -> None:
    junk = tmp_path / "junk.crt"
    junk.write_text("hello")
    for wrong in (junk, files.key):
        with pytest.raises(DataError, match=r"not a certificate in PEM form.* Ask the server's operator for ca.crt"):
            check_authority(wrong)
    with pytest.raises(DataError, match="a server's own certificate"):
        check_authority(files.certificate)


def test_a_key_that_others_may_read_is_told(tmp_path: Path) -> None:
    pair = make_key(tmp_path / "store")
    assert read_by_others(pair.private) is None
    pair.private.chmod(0o640)
    assert f"chmod 600 {pair.private}" in str(read_by_others(pair.private))


def test_a_key_that_is_none(files: ServerFiles, tmp_path: Path) -> None:
    (tmp_path / "site.key").write_text("a secret that is no key")
    shutil.copy(files.key, tmp_path / "pem.key")                  # a server's key, in another form
    for name in ("site.key", "pem.key"):
        with pytest.raises(DataError, match="not a site's key") as refused:
            check_node_key(NodeKey(tmp_path / name))
        assert "a secret" not in str(refused.value)
