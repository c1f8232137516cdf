"""Settings of the commands that are clients of a gateway: TLS, and the key."""

import ssl
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from shared import access
from shared.settings import Settings


class TlsClientSettings(Settings):
    """Flags of every command that talks to a gateway over https."""

    ssl_ca_certs: Path | None = Field(
        None,
        description="Authorities in PEM that a server is trusted by; the system's unless given.",
    )
    ssl_certfile: Path | None = Field(
        None, description="Client certificate in PEM, for a server that wants one."
    )
    ssl_keyfile: Path | None = Field(
        None, description="Its private key; in --ssl-certfile unless given."
    )

    def tls(self) -> ssl.SSLContext | None:
        """For https; None if nothing was given. Raises ValueError, naming the flag, for a file that cannot be used."""
        if self.ssl_ca_certs is None and self.ssl_certfile is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ssl_ca_certs)
        except OSError as error:
            raise ValueError(f"--ssl-ca-certs {self.ssl_ca_certs}: {error}") from None
        if self.ssl_certfile is not None:
            try:
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
            except (OSError, ValueError) as error:
                raise ValueError(f"--ssl-certfile {self.ssl_certfile}: {error}") from None
        return context


class GatewayClientSettings(TlsClientSettings):
    """Flags of the commands that send a key."""

    COMMON_VARIABLES: ClassVar[frozenset[str]] = frozenset({"api_key"})

    api_key: str | None = Field(
        None, description="The server's key, if it has one; TESSERA_API_KEY unless given."
    )
    api_key_file: Path | None = Field(
        None, description="File with that key, in its first line that is not a # comment."
    )

    @property
    def key(self) -> str:
        """The key that is sent; empty for none. Raises InvalidRequest if the file holds none."""
        return access.client_key(self.api_key, self.api_key_file)
