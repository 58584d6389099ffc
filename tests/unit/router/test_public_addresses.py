"""Which addresses images may be fetched from where any host may be asked."""

import pytest

from baton_serve.services.router.text.multimodal.public_addresses import is_public

PUBLIC = """
8.8.8.8 1.1.1.1 100.63.255.255 100.128.0.1 172.15.0.1 172.32.0.1 168.63.129.17 198.17.0.1 198.20.0.1 223.255.255.254
192.0.1.1 192.88.98.1 2606:4700:4700::1111 2a00:1450::1 2001:4860:4860::8888 64:ff9b::808:808 2002:808:808::1
2600::5efe:808:808
""".split()

OTHERS = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 100.127.255.255 127.0.0.1 127.255.255.254 169.254.169.254
172.16.0.1 172.31.255.255 168.63.129.16 192.0.0.1 192.0.0.9 192.0.0.170 192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1
198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
:: ::1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:808:808 64:ff9b::7f00:1 64:ff9b::a00:1 64:ff9b::a9fe:a9fe
64:ff9b:1::808:808 64:ff9b:1::7f00:1 100::1 100:0:0:1::1 2001::1 2001:0:808:808::1 2001:1::1 2001:2::1 2001:10::1
2001:20::1 2001:db8::1 2002:7f00:1:: 2002:a00:1::1 2002:a9fe:a9fe:: 3fff::1 4000::1 5f00::1 fc00::1 fd00:ec2::254
fe80::1 fe80::1%eth0 fec0::1 feff::1 ff02::1 ff0e::1 2600::5efe:7f00:1 2600::200:5efe:a00:1
""".split()


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_of_a_host_on_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", OTHERS)
def test_any_other_address_is_not(address: str) -> None:
    assert not is_public(address)
