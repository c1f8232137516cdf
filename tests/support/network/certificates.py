"""Certificates made for a test: an authority, what it has signed, and a stranger's."""

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """Files in PEM. `server` is of localhost and 127.0.0.1, `client` of a client; both hold their keys too."""

    authority: Path
    server: Path
    key: Path  # of the server, alone
    client: Path
    stranger: Path  # an authority that has signed none of them


def make_certificates(folder: Path) -> Certificates:
    """Writes them."""
    authority, stranger = trustme.CA(), trustme.CA()
    server, client = authority.issue_cert("localhost", "127.0.0.1"), authority.issue_cert("a@b.c")
    paths = Certificates(
        *(folder / f"{name}.pem" for name in ("ca", "server", "key", "client", "stranger"))
    )
    authority.cert_pem.write_to_path(paths.authority)
    stranger.cert_pem.write_to_path(paths.stranger)
    server.private_key_and_cert_chain_pem.write_to_path(paths.server)
    server.private_key_pem.write_to_path(paths.key)
    client.private_key_and_cert_chain_pem.write_to_path(paths.client)
    return paths
