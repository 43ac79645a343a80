from __future__ import annotations

import psutil
import pytest

from host.network import interface_of, listen_for, own_address_towards


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_this_machine_is_reached_through_loopback(host: str) -> None:
    assert interface_of(own_address_towards(host)) == "lo"


def test_interface_towards_another_machine_is_the_one_with_the_address_towards_it() -> None:
    try:
        own = own_address_towards("192.0.2.1")
    except OSError:
        pytest.skip("this machine has no way to other networks")
    addresses = psutil.net_if_addrs()[interface_of(own)]
    assert own in [entry.address for entry in addresses]


@pytest.mark.parametrize("port", [-1, 65536])
def test_number_that_is_no_port_is_refused_with_the_name_of_what_was_set(port: int) -> None:
    with pytest.raises(ValueError, match=rf"--port={port}: .*a port is 0\.\.\.65535.*another port"):
        listen_for("--port", "127.0.0.1", port)
