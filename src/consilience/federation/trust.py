"""What a server or a site is given to trust is looked at before anything starts: a wrong file is named at once, with what to do.

Flower would start all the same. A server with an expired certificate then never answers itself, and a site whose authority is no
certificate tries for ever.
"""

from __future__ import annotations

import datetime
import os
import shlex
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import DataError
from .certificates import NodeKey, ServerFiles, expires, load_certificate

SOON = 30                      # days before a certificate's end at which a server says so


def check_server(files: ServerFiles) -> ServerFiles:
    """A server's certificate, key and authority belong together and are valid today."""
    files.check()
    mend = f"Make another with: consilience federation certificates {files.folder} --host NAME --again"
    authority, certificate = load_certificate(files.authority), load_certificate(files.certificate)
    try:
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DataError(f"The file {str(files.key)!r} is not a private key in PEM form: {error}. {mend}") from None
    if key.public_key() != certificate.public_key():
        raise DataError(f"{str(files.key)!r} does not belong to {str(files.certificate)!r}: one of them is of another certificate. {mend}")
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise DataError(f"The authority {str(files.authority)!r} did not sign {str(files.certificate)!r}, so no site would believe it. "
                        f"{mend}") from None
    _valid_today(files.certificate, certificate, f"{mend} (it needs ca.key; sites need nothing new)")
    _valid_today(files.authority, authority, "Make a new authority in an empty folder, and give its ca.crt to every site.")
    return files


def ends_soon(files: ServerFiles) -> str | None:
    """A warning where the server's certificate ends within a month."""
    until = expires(files.certificate)
    if until - datetime.datetime.now(datetime.UTC) > datetime.timedelta(days=SOON):
        return None
    return (f"The server's certificate ends on {until:%Y-%m-%d}; from then on no site is let in. Make another, from the same authority, "
            f"with: consilience federation certificates {files.folder} --host NAME --again")


def check_authority(path: Path) -> None:
    """The certificate by which a site knows its server is one of an authority, and valid today."""
    ask = "Ask the server's operator for ca.crt."
    try:
        certificate = load_certificate(path)
    except DataError as error:
        raise DataError(f"--ca: {error} {ask}") from None
    try:
        is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_authority = True                        # an old authority of one's own may say nothing
    if not is_authority:
        raise DataError(f"--ca: {str(path)!r} is a server's own certificate, not that of the authority which signed it. {ask}")
    _valid_today(path, certificate, ask)


def check_node_key(pair: NodeKey) -> None:
    """A site's key is one that Flower reads."""
    try:
        key = serialization.load_ssh_private_key(pair.private.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DataError(f"The file {str(pair.private)!r} is not a site's key as `consilience federation key` makes it. Bring the old one "
                        f"back from a backup; or move it away, make a new one with: consilience federation key {pair.private.parent}, and "
                        "have the server's operator admit that.")


def read_by_others(key: Path) -> str | None:
    """A warning where others of this machine may read a private key, as after copying it. They could speak for its owner."""
    if os.name == "nt" or not key.stat().st_mode & 0o077:
        return None
    return (f"Others with an account here may read or change the private key {str(key)!r}. Take that from them with: chmod 600 "
            f"{shlex.quote(str(key))}")


def _valid_today(path: Path, certificate: x509.Certificate, mend: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        raise DataError(f"The certificate {str(path)!r} ended on {certificate.not_valid_after_utc:%Y-%m-%d}. {mend}")
    if now < certificate.not_valid_before_utc:
        raise DataError(f"The certificate {str(path)!r} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on, and the "
                        f"clock of this machine says {now:%Y-%m-%d %H:%M} UTC. Is the clock right?")
