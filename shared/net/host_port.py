"""Addresses as text, `host:port`."""


def join(host: str, port: int) -> str:
    """The address of both; a host of IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
