"""Which network addresses media may be fetched from: the public internet and nothing else."""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Cloud metadata services outside the private ranges.
_METADATA = {ipaddress.ip_address("168.63.129.16")}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(text: str) -> bool:
    """Whether an address is one of the public internet, whatever form it is wrapped in.

    False for private, loopback, link-local, shared (100.64/10), multicast, reserved and metadata
    addresses, also inside IPv4-mapped, 6to4, Teredo and NAT64 forms.
    """
    address: Address = ipaddress.ip_address(text.split("%", 1)[0])
    return all(
        part.is_global and not part.is_multicast and part not in _METADATA
        for part in (address, *_embedded(address))
    )


def _embedded(address: Address) -> list[Address]:
    """IPv4 addresses that packets to an IPv6 address may be sent on to."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    inner: list[Address] = [a for a in (address.ipv4_mapped, address.sixtofour) if a is not None]
    if address.teredo is not None:
        inner.extend(address.teredo)
    if address in _NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return inner
