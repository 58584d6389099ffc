"""Which IP addresses are of a host on the open Internet. Pure.

The lists are IANA's registries of special-purpose addresses: Python's `is_global` knows neither all of their entries
nor what is not allocated, and differs from release to release.
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
_UNICAST_V6 = IPv6Network("2000::/3")
"""All that is allocated to hosts; link-local, site-local, unique local and multicast addresses lie outside."""
_SPECIAL_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocols: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
"""Upper half of the interface's identifier; the lower half is an IPv4 address."""


def is_public(address: str) -> bool:
    """True for a unicast address of one host that is routed globally, and that is not a way to an IPv4 address which is
    none. Raises `ValueError` for what is no address."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv4Address):
        return not any(ip in network for network in _SPECIAL_V4)
    within = _within(ip)
    if within is not None and not is_public(str(within)):
        return False
    if ip in _NAT64:
        return True
    return ip in _UNICAST_V6 and not any(ip in network for network in _SPECIAL_V6)


def _within(ip: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that a gateway would pass on to."""
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    if (int(ip) >> 32) & 0xFFFFFFFF in _ISATAP:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.sixtofour
