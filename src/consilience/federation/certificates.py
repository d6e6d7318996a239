"""A certificate authority of one's own, a server certificate it signs, and the key pairs by which Flower knows a site.

Private keys are written with mode 0600 and never over an existing file. The authority's key is needed again only to make another
server certificate; it belongs off the server. The library `cryptography` comes with the extra 'flower'.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import ConfigError, DataError
from ..runs.files import disk

LOOPBACK = ("localhost", "127.0.0.1", "::1")       # the server's own processes reach it there
AUTHORITY_DAYS = 3650
SERVER_DAYS = 365
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*\.?")


@dataclass(frozen=True)
class ServerFiles:
    """Where the server's certificate lies. Sites need `authority` alone."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def authority_key(self) -> Path:
        return self.folder / "ca.key"

    @property
    def certificate(self) -> Path:
        return self.folder / "server.crt"

    @property
    def key(self) -> Path:
        return self.folder / "server.key"

    def check(self) -> ServerFiles:
        """Refuse a folder that lacks what a server needs."""
        for path in (self.authority, self.certificate, self.key):
            if not path.is_file():
                raise DataError(f"There is no file {str(path)!r}. Make certificates with: consilience federation certificates "
                                f"{self.folder} --host NAME")
        return self


@dataclass(frozen=True)
class NodeKey:
    """A site's key pair, in the form Flower reads: OpenSSH, curve P-384."""

    private: Path

    @property
    def public(self) -> Path:
        return self.private.with_suffix(".pub")


def make_certificates(folder: str | Path, hosts: Sequence[str], *, days: int = SERVER_DAYS, again: bool = False) -> ServerFiles:
    """An authority (kept where there is one) and a server certificate for these host names and addresses.

    `again` makes a new server certificate, signed by the same authority, so that sites need nothing new.
    """
    files = ServerFiles(Path(folder))
    names = subject_names(hosts)
    if days < 1:
        raise ConfigError(f"A certificate must be valid for at least 1 day. Got {days} instead.")
    if files.certificate.exists() and not again:
        raise ConfigError(f"{str(files.certificate)!r} exists. Give --again for a new server certificate from the same authority, or "
                          "name another folder.")
    now = datetime.datetime.now(datetime.UTC)
    until = load_certificate(files.authority).not_valid_after_utc if files.authority.is_file() else _after(now, AUTHORITY_DAYS)
    left = max(-((now - until) // datetime.timedelta(days=1)), 0)                # days, a part of one counted whole
    if days > left:
        raise ConfigError(f"A server's certificate cannot be valid for longer than its authority, which ends on {until:%Y-%m-%d}: for at "
                          f"most {left} days. Got {days} instead. For longer make a new authority in an empty folder, and give its ca.crt "
                          "to every site.")
    _private_folder(files.folder)
    if files.authority_key.is_file() and files.authority.is_file():
        authority_key, authority = _read_authority(files)
    elif files.authority.exists():
        raise DataError(f"The authority's key {str(files.authority_key)!r} is not here, so no certificate can be signed. Bring it back, or "
                        "name an empty folder for a new authority.")
    else:
        authority_key = ec.generate_private_key(ec.SECP384R1())
        authority = _sign(_subject("Consilience federation authority"), authority_key.public_key(), authority_key, None, until, [])
        _write(files.authority_key, _pem(authority_key), secret=True)
        _write(files.authority, authority.public_bytes(serialization.Encoding.PEM))
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = _sign(_subject(hosts[0][:64]), key.public_key(), authority_key, authority, min(_after(now, days), until), names)
    if again:
        for old in (files.key, files.certificate):
            old.unlink(missing_ok=True)
    _write(files.key, _pem(key), secret=True)
    _write(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    return files


def make_key(path: str | Path) -> NodeKey:
    """A site's key pair: the private half stays at the site, the public half goes to the server's operator."""
    pair = NodeKey(Path(path) if Path(path).suffix == ".key" else Path(path) / "site.key")
    for old in (pair.private, pair.public):
        if old.exists():
            raise ConfigError(f"{str(old)!r} exists. A site keeps its key; name another place for a new one.")
    _private_folder(pair.private.parent)
    key = ec.generate_private_key(ec.SECP384R1())
    s = serialization
    _write(pair.private, key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption()), secret=True)
    _write(pair.public, key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH) + b"\n")
    return pair


def subject_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Host names and addresses, with those of the machine itself, as a certificate lists them."""
    out: dict[str, x509.GeneralName] = {}
    if not hosts:
        raise ConfigError("A server certificate needs the names or addresses by which sites reach the server: --host NAME.")
    for host in (*hosts, *LOOPBACK):
        try:
            out[host] = x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
        except ValueError:
            looks_like_address = set(host) <= set("0123456789.:/")
            if looks_like_address or not _NAME.fullmatch(host):
                raise ConfigError(f"--host must be a host name or an IP address, without port. Got {host!r} instead.") from None
            out[host] = x509.DNSName(host)
    return list(out.values())


def hosts_of(certificate: Path) -> list[str]:
    """The names and addresses a certificate is valid for."""
    names = load_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(n.value) for n in names]


def expires(certificate: Path) -> datetime.datetime:
    return load_certificate(certificate).not_valid_after_utc


def load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"There is no file {str(path)!r}.") from None
    except ValueError as error:
        raise DataError(f"The file {str(path)!r} is not a certificate in PEM form: {error}.") from None


def _read_authority(files: ServerFiles) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        key = serialization.load_pem_private_key(files.authority_key.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise DataError(f"The file {str(files.authority_key)!r} is not a private key in PEM form: {error}.") from None
    certificate = load_certificate(files.authority)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise DataError(f"{str(files.authority_key)!r} does not belong to {str(files.authority)!r}.")
    return key, certificate


def _after(now: datetime.datetime, days: int) -> datetime.datetime:
    """A moment some days from now, in whole seconds as certificates have it."""
    return now.replace(microsecond=0) + datetime.timedelta(days=days)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _sign(subject: x509.Name, public: ec.EllipticCurvePublicKey, signing: ec.EllipticCurvePrivateKey, issuer: x509.Certificate | None,
          until: datetime.datetime, names: list[x509.GeneralName]) -> x509.Certificate:
    """A certificate; without an issuer that of an authority, signed by itself."""
    root = issuer is None
    now = datetime.datetime.now(datetime.UTC)
    usage = dict.fromkeys(("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
                           "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False)
    usage |= {"key_cert_sign": True, "crl_sign": True} if root else {"digital_signature": True}
    made = (x509.CertificateBuilder().subject_name(subject).issuer_name(issuer.subject if issuer else subject).public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))             # clocks of sites may be behind
            .not_valid_after(until)
            .add_extension(x509.BasicConstraints(ca=root, path_length=0 if root else None), critical=True)
            .add_extension(x509.KeyUsage(**usage), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False))
    if not root:
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return made.sign(signing, hashes.SHA384())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    s = serialization
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def _private_folder(folder: Path) -> None:
    with disk("make", folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    """A new file; private keys are never readable by others, not even while they are written."""
    with disk("write", path), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)
