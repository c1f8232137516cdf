"""TLS of a gateway's two servers: their certificate, and the authority for client certificates."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc

from shared.errors import InvalidRequest


class TlsFlags(Protocol):
    """The settings of TLS."""

    @property
    def ssl_certfile(self) -> Path | None: ...
    @property
    def ssl_keyfile(self) -> Path | None: ...
    @property
    def ssl_ca_certs(self) -> Path | None: ...
    @property
    def ssl_cert_reqs(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files in PEM; `cert_reqs` as in Python's ssl: 0 asks for no client certificate, 1 checks one that comes, 2 needs
    one.
    """

    certfile: Path
    keyfile: Path
    ca_certs: Path | None
    cert_reqs: int

    @classmethod
    def of(cls, settings: TlsFlags) -> "ServerTls | None":
        """None without a certificate. Raises InvalidRequest, naming the flag, for files that do not go together."""
        if settings.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
                if getattr(settings, name):
                    raise _bad(name, "needs --ssl-certfile, the server's own certificate")
            return None
        if settings.ssl_cert_reqs and settings.ssl_ca_certs is None:
            raise _bad(
                "ssl_cert_reqs", "needs --ssl-ca-certs, who signs the certificates of clients"
            )
        tls = cls(
            settings.ssl_certfile,
            settings.ssl_keyfile or settings.ssl_certfile,  # one file may hold both
            settings.ssl_ca_certs,
            settings.ssl_cert_reqs or 0,
        )
        tls._check()
        return tls

    def uvicorn_options(self) -> dict[str, Any]:
        """Arguments of `uvicorn.Config`."""
        return {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_ca_certs": self.ca_certs,
            "ssl_cert_reqs": self.cert_reqs,
        }

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The same for gRPC, which knows no optional client certificates: it asks for none then."""
        needed = self.cert_reqs == ssl.CERT_REQUIRED
        assert self.ca_certs is not None or not needed
        return grpc.ssl_server_credentials(
            [(self.keyfile.read_bytes(), self.certfile.read_bytes())],
            self.ca_certs.read_bytes() if self.ca_certs and needed else None,
            needed,
        )

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without an explicit password OpenSSL would prompt for one.
            context.load_cert_chain(self.certfile, self.keyfile, password=lambda: "")
        except (OSError, ValueError) as error:
            raise _bad("ssl_certfile", f"{self.certfile} with {self.keyfile}: {error}") from None
        try:
            if self.ca_certs is not None:
                context.load_verify_locations(self.ca_certs)
        except OSError as error:
            raise _bad("ssl_ca_certs", f"{self.ca_certs}: {error}") from None


def _bad(field: str, what: str) -> InvalidRequest:
    return InvalidRequest("BAD_CERTIFICATE", f"--{field.replace('_', '-')}: {what}", field=field)
