"""The options for credentials at a hub, and for trusted authorities."""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from kvspool.cli.options import BadInput

if TYPE_CHECKING:
    from hub.client.connection import Security

TOKEN = "KVSPOOL_TOKEN"  # the environment variable


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that connects to hubs. gRPC prints no lines of its own: the command has words for its errors."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    group = parser.add_argument_group("security", "Files are read again for each connection, so that they can be replaced at any time.")
    group.add_argument("--token-file", type=Path, metavar="FILE", help=f"file with the token, mode 600 (default: the variable {TOKEN})")
    group.add_argument("--ca", type=Path, metavar="FILE", help="certificates (PEM) of trusted authorities (default: those of the system)")
    group.add_argument("--certificate", type=Path, metavar="FILE", help="client certificate (PEM), if the hub asks for one")
    group.add_argument("--key", type=Path, metavar="FILE", help="its key (PEM), mode 600")


def load(arguments: argparse.Namespace) -> Security:
    """Return the security in the options. Raises BadInput for files that can't be read, or that other users may read."""
    from hub.client.connection import Security

    check_certificate(arguments)
    token = os.environ.get(TOKEN) if arguments.token_file is None else token_in_file(arguments)
    found = Security(
        token=token or None,
        authorities=None if arguments.ca is None else _read(arguments.ca),
        certificate=None if arguments.certificate is None else _read(arguments.certificate),
        key=None if arguments.key is None else private(arguments.key),
    )
    if arguments.ca is not None or arguments.certificate is not None:
        context(arguments)  # gRPC would say that no address can be reached
    return found


def context(arguments: argparse.Namespace) -> ssl.SSLContext:
    """Return the context of the options for TLS 1.2 and newer. Raises BadInput for files that can't be used."""
    check_certificate(arguments)
    try:
        if arguments.key is not None:
            private(arguments.key)
        found = ssl.create_default_context(cafile=arguments.ca)
        found.minimum_version = ssl.TLSVersion.TLSv1_2
        if arguments.certificate is not None:
            found.load_cert_chain(arguments.certificate, arguments.key, password="")
    except (ssl.SSLError, ValueError, OSError) as error:
        given = ", ".join(str(path) for path in (arguments.ca, arguments.certificate, arguments.key) if path is not None)
        words = "give certificates and a key without a password, in PEM, as kvspool hub certificate makes them"
        raise BadInput(f"{given or 'the certificates of the system'} can't be used for TLS ({error}); {words}") from error
    return found


def check_certificate(arguments: argparse.Namespace) -> None:
    """Raise BadInput for a certificate without its key, or a key without its certificate."""
    if (arguments.certificate is None) != (arguments.key is None):
        raise BadInput("--certificate and --key go together")


def token_in_file(arguments: argparse.Namespace) -> str | None:
    """Return the token in the file of --token-file. Raises BadInput."""
    return None if arguments.token_file is None else private(arguments.token_file).decode("ascii", "replace").strip()


def private(path: Path) -> bytes:
    """Return the content of a file that only its owner may read."""
    data = _read(path)
    if path.stat().st_mode & 0o077:
        raise BadInput(f"other users may read {path}: chmod 600 {path}")
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}); check the path and its rights") from error
