"""Settings of TLS for the commands that are clients."""

import ssl
from pathlib import Path

from pydantic import Field

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
