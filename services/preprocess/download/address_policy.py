"""Which network addresses media may be fetched from: the public internet and nothing else."""

import ipaddress
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Addresses that `is_global` of Python takes for public, in some version at least, and that are not
# globally routable hosts: by IANA's registries of special-purpose addresses, or because clouds answer
# their own machines there.
_NOT_PUBLIC: Sequence[Network] = [
    ipaddress.ip_network(text)
    for text in (
        "168.63.129.16/32",  # a cloud's own services
        "192.0.0.0/24",  # protocol assignments; at .192 a cloud's metadata
        "192.88.99.0/24",  # relays of 6to4
        "240.0.0.0/4",
        "64:ff9b:1::/48",  # NAT64 within a network
        "100::/64",
        "2001::/23",  # protocol assignments; Teredo is in here
        "2001:db8::/32",
        "3fff::/20",
        "5f00::/16",
        "fec0::/10",  # site-local, as once was
    )
]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")
_LOW = 0xFFFFFFFF
_SIX_TO_FOUR = ipaddress.ip_network("2002::/16")
# Bits 32 to 63 of an ISATAP address, in front of one of IPv4, with and without the bit "unique" (RFC 5214, 6.1).
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


def is_public(text: str) -> bool:
    """Whether an address is a globally routable one, whatever form it is wrapped in.

    False for all that is private, local, shared, multicast, reserved or a cloud's own. Forms of IPv6 that carry an
    address of IPv4: tunnels (6to4, ISATAP, Teredo) and compatible ones are never public, mapped ones and those of NAT64
    (which resolvers give within networks of IPv6 alone) where the address that they carry is.
    """
    address: Address = ipaddress.ip_address(text.split("%", 1)[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_global(address.ipv4_mapped)
        if address in _COMPATIBLE or address in _SIX_TO_FOUR or _is_isatap(address):
            return False
        if address in _NAT64:
            return _is_global(ipaddress.IPv4Address(int(address) & _LOW))
    return _is_global(address)


def _is_isatap(address: ipaddress.IPv6Address) -> bool:
    return int(address) >> 32 & _LOW in _ISATAP


def _is_global(address: Address) -> bool:
    return (
        address.is_global
        and not (address.is_multicast or address.is_reserved or address.is_unspecified)
        and not any(
            address in network for network in _NOT_PUBLIC if network.version == address.version
        )
    )
