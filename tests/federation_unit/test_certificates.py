"""Certificates verify as TLS clients verify them, and private keys stay private."""

from __future__ import annotations

import socket
import ssl
import stat
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from consilience.errors import ConfigError, DataError
from consilience.federation.certificates import ServerFiles, expires, hosts_of, make_certificates, make_key


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def handshake(files: ServerFiles, authority, name: str) -> str:
    """Who the server turns out to be for a client that trusts `authority` and asks for `name`."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)
    near, far = socket.socketpair()

    def serve() -> None:
        with socket.socket(fileno=far.detach()) as plain:
            try:
                with server.wrap_socket(plain, server_side=True) as tls:
                    tls.recv(1)
            except (ssl.SSLError, OSError):
                pass
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with near, ssl.create_default_context(cafile=str(authority)).wrap_socket(near, server_hostname=name) as tls:
            return dict(x[0] for x in tls.getpeercert()["subject"])["commonName"]
    finally:
        thread.join()


def test_a_client_that_trusts_the_authority_accepts_the_server(tmp_path):
    files = make_certificates(tmp_path / "c", ["hub.example.org", "10.1.2.3"])
    for name in ("hub.example.org", "10.1.2.3", "localhost", "127.0.0.1"):
        assert handshake(files, files.authority, name) == "hub.example.org"


def test_another_name_and_another_authority_are_refused(tmp_path):
    files = make_certificates(tmp_path / "c", ["hub.example.org"])
    other = make_certificates(tmp_path / "d", ["hub.example.org"])
    with pytest.raises(ssl.SSLCertVerificationError, match=r"[Hh]ostname mismatch"):
        handshake(files, files.authority, "evil.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(files, other.authority, "hub.example.org")


def test_private_keys_can_be_read_by_their_owner_alone(tmp_path):
    files, pair = make_certificates(tmp_path / "c", ["hub"]), make_key(tmp_path / "s")
    assert [mode(p) for p in (files.key, files.authority_key, pair.private)] == [0o600] * 3


def test_again_keeps_the_authority(tmp_path):
    files = make_certificates(tmp_path / "c", ["old.example.org"])
    authority, key = files.authority.read_bytes(), files.key.read_bytes()
    with pytest.raises(ConfigError, match="--again"):
        make_certificates(tmp_path / "c", ["new.example.org"])
    make_certificates(tmp_path / "c", ["new.example.org"], again=True, days=10)
    assert files.authority.read_bytes() == authority
    assert files.key.read_bytes() != key
    assert hosts_of(files.certificate)[0] == "new.example.org"
    assert handshake(files, files.authority, "new.example.org") == "new.example.org"
    assert expires(files.certificate) < expires(files.authority)


def test_an_authority_without_its_key_signs_nothing(tmp_path):
    files = make_certificates(tmp_path / "c", ["hub"])
    files.authority_key.unlink()
    with pytest.raises(DataError, match=r"ca\.key"):
        make_certificates(tmp_path / "c", ["hub"], again=True)
    assert files.check() is files


@pytest.mark.parametrize("host", ["hub:9092", "https://hub", "", "a b", "300.1.2.3", "10.0.0.0/8", "-x"])
def test_names_that_are_none(tmp_path, host):
    with pytest.raises(ConfigError, match="--host"):
        make_certificates(tmp_path / "c", [host])
    assert not (tmp_path / "c").exists()


def test_a_sites_key_is_what_flower_reads(tmp_path):
    pair = make_key(tmp_path / "s")
    private = load_ssh_private_key(pair.private.read_bytes(), None)
    public = load_ssh_public_key(pair.public.read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert private.public_key() == public
    with pytest.raises(ConfigError, match="keeps its key"):
        make_key(tmp_path / "s")


def test_a_folder_that_lacks_files(tmp_path):
    with pytest.raises(DataError, match="consilience federation certificates"):
        ServerFiles(tmp_path).check()
