"""Decides whether an IP address belongs to a host on the public Internet. This module is pure.

The lists are copied from IANA's registries of special-purpose addresses. Python's `is_global` lacks some of their
entries, treats addresses that are not allocated as global, and differs between Python releases.
"""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_SPECIAL_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by a provider's customers
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # the host of a virtual machine at Azure
        "169.254.0.0/16",  # link-local, and metadata of clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocols
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
"""IPv4 networks that are not public, from IANA's registry, and one address of Azure."""

_UNICAST_V6 = IPv6Network("2000::/3")
"""The part of IPv6 that is allocated to hosts. Link-local, site-local, unique local and multicast networks are outside.
"""
_SPECIAL_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocols: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
"""IPv6 networks within `_UNICAST_V6` that are not public."""

_NAT64 = IPv6Network("64:ff9b::/96")
"""Addresses that a NAT64 gateway translates to the IPv4 address in their last 32 bits (RFC 6052)."""

_ISATAP = (0x00005EFE, 0x02005EFE)
"""Upper half of the interface identifier of ISATAP (RFC 5214); the lower half is an IPv4 address."""


def is_public(address: str) -> bool:
    """Return whether the IP address `address` belongs to one host of the public internet, and not, for example, to a
    private network.

    An IPv6 address that contains an IPv4 address must have a public one. Raises `ValueError` if `address` is not an IP
    address.
    """
    # Remove the zone of a link-local address ("fe80::1%eth0").
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv4Address):
        return not any(ip in network for network in _SPECIAL_V4)
    # A gateway (NAT64, ISATAP, 6to4) would forward the connection to the embedded address, such as 127.0.0.1.
    within = _within(ip)
    if within is not None and not is_public(str(within)):
        return False
    if ip in _NAT64:
        return True
    return ip in _UNICAST_V6 and not any(ip in network for network in _SPECIAL_V6)


def _within(ip: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that an IPv6 address contains, to which a gateway would forward, or None if it contains
    none.
    """
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    if (int(ip) >> 32) & 0xFFFFFFFF in _ISATAP:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.sixtofour
