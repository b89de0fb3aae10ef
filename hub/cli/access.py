"""`kvspool hub token` and `kvspool hub certificate`: the credentials of a hub's users."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub.errors import CertificateError
from hub.security import access_file, private
from hub.security.access_file import ROLES
from hub.security.tokens import Token
from kvspool import system
from kvspool.cli import options, output
from kvspool.cli.options import BadInput

if TYPE_CHECKING:
    from rich.table import Table

    from hub.security.certificates import Certificate

MOST_DAYS = 36500

TOKEN = """\
Manage the tokens that authenticate a hub's users. Their hashes are stored in the hub's access file, together with the rights of each
principal. The hub notices a change within a second or two. All other settings in the file are edited manually."""
TOKEN_EXAMPLES = """\
  kvspool hub token add access.toml --name jfk --output jfk.token
  kvspool hub token add access.toml --name spark --role reader --read '*'
  kvspool hub token list access.toml
  kvspool hub token revoke access.toml 3fa9c2d1"""

ADD = """\
Create a token for a principal, and write its hash to the access file ACCESS, which is created if it is missing. The token itself is shown
only now: on standard output, or in the file of --output. A principal may have several tokens, so that a new one can be distributed before
the old one is revoked. A client may write the shards of its own name, and of names that begin with it and a hyphen."""
ADD_EXAMPLES = """\
  kvspool hub token add access.toml --name jfk --output jfk.token
  kvspool hub token add access.toml --name spark --role reader --read 'jfk*' --read lga
  kvspool hub token add access.toml --name operator --role admin"""

LIST = """\
List the tokens of an access file: id, principal, role, time of creation, and whether the token is valid. Principals with only a
certificate are listed, too."""
LIST_EXAMPLES = """\
  kvspool hub token list access.toml
  kvspool hub token list access.toml --json | jq -r 'select(.token and (.revoked | not)).token'"""

REVOKE = """\
Revoke a token, named by its id, or a certificate, named by its first name. A running hub notices it within a second or two, and ends
the calls in progress."""
REVOKE_EXAMPLES = """\
  kvspool hub token revoke access.toml 3fa9c2d1
  kvspool hub token revoke access.toml --identity jfk.example.com"""

CERTIFICATE = """\
Create certificates for a hub and its clients with your own authority. If you have another authority, use its certificates."""
CERTIFICATE_EXAMPLES = """\
  kvspool hub certificate init pki --name hub.example.com --name 10.0.0.7
  kvspool hub certificate client pki jfk
  kvspool hub certificate server pki --name hub.example.com --force      a year later
  kvspool hub certificate server pki --name hub2.example.com --output hub2      for a second hub
  kvspool hub certificate show pki/server.pem"""

INIT = """\
Create an authority and a hub's certificate in the directory DIR: ca.pem, ca.key, server.pem, server.key. The hub needs the last two, and
ca.pem if clients have certificates too; clients need ca.pem. With ca.key any identity can be forged: keep it away from the hub."""
INIT_EXAMPLES = """\
  kvspool hub certificate init pki --name hub.example.com --name 10.0.0.7"""

SERVER = """\
Create a hub's certificate, signed by the authority in the directory DIR: server.pem, server.key. A running hub uses a new one without a
restart. With --output the two files are written to another directory: clients then trust several hubs by the same ca.pem."""
SERVER_EXAMPLES = """\
  kvspool hub certificate server pki --name hub.example.com --force
  kvspool hub certificate server pki --name hub2.example.com --output hub2      for a second hub"""

CLIENT = """\
Create a client's certificate, signed by the authority in the directory DIR: clients/NAME.pem, clients/NAME.key. The hub identifies it by
NAME, which must be listed in its access file: certificates = ["NAME"]. Revoking a name revokes all certificates with that name, so give
the next certificate another name."""
CLIENT_EXAMPLES = """\
  kvspool hub certificate client pki jfk
  kvspool hub certificate client pki jfk.2027 --days 30"""

SHOW = """\
Show a certificate: its names, expiry, and fingerprint. The exit code is 1 if it isn't valid now."""
SHOW_EXAMPLES = """\
  kvspool hub certificate show pki/server.pem
  kvspool hub certificate show pki/server.pem --json | jq .not_after"""


def add(commands: Any) -> None:
    """Add the commands to those of `kvspool hub`."""
    _add_tokens(options.add_group(commands, "token", "create, list and revoke tokens", TOKEN, TOKEN_EXAMPLES))
    _add_certificates(options.add_group(commands, "certificate", "create and show certificates", CERTIFICATE, CERTIFICATE_EXAMPLES))


# Tokens.


def _add_tokens(commands: Any) -> None:
    adding = options.add_command(commands, "add", "create a token", ADD, ADD_EXAMPLES)
    _add_access(adding)
    adding.add_argument("--name", required=True, help="the principal: for a client, its id")
    adding.add_argument("--role", choices=ROLES, help="role of a new principal (default: client)")
    adding.add_argument(
        "--read", action="append", default=[], metavar="PATTERN", help="clients that it may read: an id, or a prefix and *; repeatable"
    )
    adding.add_argument("--output", type=Path, metavar="FILE", help="write the token to this new file, readable only by its owner")
    options.add_json(adding, "print the token's id, and without --output the token, as a JSON object")
    adding.set_defaults(run=_token_add)

    listing = options.add_command(commands, "list", "list the tokens", LIST, LIST_EXAMPLES)
    _add_access(listing)
    options.add_json(listing, "print one JSON object for each token")
    listing.set_defaults(run=_token_list)

    revoking = options.add_command(commands, "revoke", "revoke a token", REVOKE, REVOKE_EXAMPLES)
    _add_access(revoking)
    which = revoking.add_mutually_exclusive_group(required=True)
    which.add_argument("id", nargs="?", metavar="ID", help="the token's id: the 8 digits after kvs_; never the token itself")
    which.add_argument("--identity", metavar="NAME", help="the first name in a client's certificate")
    revoking.set_defaults(run=_token_revoke)


def _add_access(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("access", metavar="ACCESS", type=Path, help="the access file of the hub")


def _token_add(arguments: argparse.Namespace) -> int:
    """Create a token and print it; a token is never printed before its hash was written to the access file."""
    token = Token.make()
    if arguments.output is not None:
        _write(arguments.output, token)
    try:
        _give(token, arguments)
    except BaseException:
        if arguments.output is not None:
            system.port.remove(arguments.output)
        raise
    shown = {} if arguments.output is not None else {"token": token.reveal()}
    if arguments.json:
        output.print_json({"id": token.id, "principal": arguments.name, **shown})
    elif shown:
        print(token.reveal())
    else:
        print(output.escape(f"token {token.id} of {arguments.name} is in {arguments.output}"))
    return 0


def _give(token: Token, arguments: argparse.Namespace) -> None:
    try:
        access_file.add_token(arguments.access, token, arguments.name, arguments.role, tuple(arguments.read))
    except ValueError as error:
        raise BadInput(str(error)) from error


def _write(path: Path, token: Token) -> None:
    try:
        private.write(path, token.reveal().encode() + b"\n")
    except FileExistsError:
        raise BadInput(f"{path} already exists; a token is written to a new file") from None


def _token_list(arguments: argparse.Namespace) -> int:
    """Print the tokens."""
    rows = _rows(access_file.read(arguments.access))
    if arguments.json:
        for row in rows:
            output.print_json(row)
    else:
        output.print_table(_table(rows))
    return 0


def _rows(found: access_file.AccessFile) -> list[dict[str, Any]]:
    rows = []
    for principal in found.principals:
        what = {"principal": principal.name, "role": principal.role}
        for token in found.tokens:
            if token.principal == principal.name:
                created = None if token.created is None else token.created.isoformat().replace("+00:00", "Z")
                rows.append({**what, "token": token.id, "created": created, "revoked": token.id in found.revoked_tokens})
        for identity in principal.certificates:
            is_revoked = identity.lower() in found.revoked_identities
            rows.append({**what, "certificate": identity, "created": None, "revoked": is_revoked})
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    cells = []
    for row in rows:
        known_by = f"token {row['token']}" if "token" in row else f"certificate {row['certificate']}"
        cells.append([row["principal"], row["role"], known_by, row["created"] or "-", "revoked" if row["revoked"] else "good"])
    return output.rows(("principal", "role", "known by", "made", "state"), cells)


def _token_revoke(arguments: argparse.Namespace) -> int:
    """Revoke a token or a certificate's name."""
    try:
        done = access_file.revoke(arguments.access, token=arguments.id, identity=arguments.identity)
    except ValueError as error:
        raise BadInput(str(error)) from error
    what = f"token {arguments.id}" if arguments.identity is None else f"certificate {arguments.identity}"
    print(output.escape(f"{what} is revoked" if done else f"{what} was revoked before"))
    return 0


# Certificates.


def _add_certificates(commands: Any) -> None:
    init = options.add_command(commands, "init", "create an authority and a hub's certificate", INIT, INIT_EXAMPLES)
    _add_directory(init, "directory of the files; created if it is missing")
    _add_names(init)
    _add_making(init, "replace existing files, which makes all certificates of the old authority useless")
    init.set_defaults(run=_certificate_init)

    server = options.add_command(commands, "server", "create a hub's certificate", SERVER, SERVER_EXAMPLES)
    _add_directory(server, "directory of ca.pem and ca.key")
    _add_names(server)
    _add_making(server, "replace existing files")
    output_help = "directory of the new files; created if it is missing (default: DIR)"
    server.add_argument("--output", type=Path, metavar="DIR", help=output_help)
    server.set_defaults(run=_certificate_server)

    client = options.add_command(commands, "client", "create a client's certificate", CLIENT, CLIENT_EXAMPLES)
    _add_directory(client, "directory of ca.pem and ca.key")
    client.add_argument("name", metavar="NAME", help="name that identifies the client to the hub")
    _add_making(client, "replace existing files")
    client.set_defaults(run=_certificate_client)

    show = options.add_command(commands, "show", "show a certificate", SHOW, SHOW_EXAMPLES)
    show.add_argument("path", metavar="FILE", type=Path, help="a certificate in PEM")
    options.add_json(show, "print a JSON object")
    show.set_defaults(run=_certificate_show)


def _add_directory(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help=words)


def _add_names(parser: argparse.ArgumentParser) -> None:
    words = "a host name or an address of the hub, as clients use it; repeatable"
    parser.add_argument("--name", action="append", required=True, metavar="HOST", help=words)


def _add_making(parser: argparse.ArgumentParser, forced: str) -> None:
    parser.add_argument(
        "--days", type=options.count(1, MOST_DAYS), default=397, metavar="N", help="validity (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help=forced)


def _certificate_init(arguments: argparse.Namespace) -> int:
    """Create the authority and the server's certificate."""
    from hub.security import authority

    return _made(arguments, "ca.pem, ca.key, server.pem and server.key", authority.make_authority, arguments.name)


def _certificate_server(arguments: argparse.Namespace) -> int:
    """Create the server's certificate."""
    from hub.security import authority

    make = partial(authority.make_server, output=arguments.output)
    return _made(arguments, "server.pem and server.key", make, arguments.name, arguments.output)


def _certificate_client(arguments: argparse.Namespace) -> int:
    """Create a client's certificate."""
    from hub.security import authority

    return _made(arguments, f"clients/{arguments.name}.pem and .key", authority.make_client, arguments.name)


def _made(arguments: argparse.Namespace, files: str, make: Any, name: Any, folder: Path | None = None) -> int:
    """Create the files, and print the result. folder: where they are, if not in the authority's directory."""
    from hub.security.certificates import moment

    try:
        certified = make(arguments.directory, name, days=arguments.days, replaces=arguments.force)
    except FileExistsError as error:  # another process has just created it
        raise CertificateError(f"{error.filename2 or error.filename} already exists") from error
    except ValueError as error:
        raise BadInput(str(error)) from error
    until = moment(certified.certificate.not_after)
    print(output.escape(f"created {files} in {folder or arguments.directory}, valid until {until}"))
    return 0


def _certificate_show(arguments: argparse.Namespace) -> int:
    """Print a certificate; code 1 if it isn't valid."""
    from hub.security import certificates

    found = certificates.read(arguments.path)
    problem = found.problem()
    if arguments.json:
        output.print_json({**vars(found), "valid": problem is None})
    else:
        for name, words in _lines(found).items():
            print(output.escape(f"{name:12} {words}"))
        print(output.escape(problem or "it is valid now"))
    return 0 if problem is None else 1


def _lines(found: Certificate) -> dict[str, str]:
    from hub.security.certificates import moment

    return {
        "subject": found.subject,
        "issuer": found.issuer,
        "names": ", ".join(found.names) or "-",
        "identity": found.identity or "-",
        "valid from": moment(found.not_before),
        "valid until": moment(found.not_after),
        "fingerprint": found.fingerprint,
    }
