"""The address and the network interface of this machine that lead to another one.

By default gloo uses the interface that this machine's name resolves to. On many machines that is
loopback (Debian maps the name to 127.0.1.1) or none, so members on two machines would never meet.
"""

from __future__ import annotations

import errno
import socket
import ssl
from ipaddress import ip_address

import psutil

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of servers of ours, which speak plain HTTP: without it, each loads the system's
certificates, which takes longer than ten requests."""
_DISCARD_PORT = 9
"""Any port would do: nothing is sent."""


def is_loopback(host: str) -> bool:
    """Whether a server at this address is reached from its own machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens at this address (port 0: a free one), and its URL. Raises OSError."""
    if not 0 <= port < 2**16:  # else an OverflowError
        raise OSError(errno.EINVAL, "a port is 0...65535")
    is_v6 = ":" in host
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if is_v6 else socket.AF_INET
    )
    place = f"[{host}]" if is_v6 else host
    return listener, f"http://{place}:{listener.getsockname()[1]}"


def listen_for(
    setting: str, host: str, port: int, otherwise: str = ""
) -> tuple[socket.socket, str]:
    """The same for a server of the settings. Raises ValueError naming it, the address and the fix;
    `otherwise`: what else may be set."""
    try:
        return listen(host, port)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # the address comes twice
        raise ValueError(
            f"{setting}={port}: cannot listen on {host}:{port} ({reason}); choose another port "
            f"(0 takes a free one){otherwise}"
        ) from None


def own_address_towards(host: str) -> str:
    """This machine's address on the interface that leads to `host`. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def address_of(interface: str) -> str:
    """An IP address that this machine has on the interface. Raises OSError if it has none."""
    for entry in psutil.net_if_addrs().get(interface, ()):
        if entry.family in (socket.AF_INET, socket.AF_INET6):
            return entry.address
    raise OSError(
        f"this machine has no network interface {interface!r} with an address; set "
        "GLOO_SOCKET_IFNAME to those that `ip address` lists"
    )


def interface_of(address: str) -> str:
    """Name of the interface that has this address of this machine. Raises OSError if none has."""
    own = ip_address(address)
    if own.is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == str(own) for entry in addresses):
            return name
    raise OSError(f"no network interface of this machine has the address {own}")
