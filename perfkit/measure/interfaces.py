"""Which network interface of this node leads to the others of a job.

Gloo takes the one that the name of its own host leads to. Where a system maps that name to loopback,
as Debian and Ubuntu do (127.0.1.1), ranks of other nodes would not find it; the connection between a
rank and rank 0 shows which interface they share.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: Request for the IPv4 address of an interface, SIOCGIFADDR of Linux.
_GET_ADDRESS = 0x8915
#: Variable by which gloo is told an interface.
_CHOSEN = "GLOO_SOCKET_IFNAME"


def find_interface(address: str) -> str | None:
    """Find the interface of this node that has an IPv4 address.

    Parameters
    ----------
    address : str
        Such as ``10.0.0.7``; also in the form ``::ffff:10.0.0.7`` of sockets for both versions.

    Returns
    -------
    name : str or None
        None where no interface has it, and on systems that do not say.
    """
    wanted = address.removeprefix("::ffff:")
    try:
        import fcntl
    except ImportError:  # Windows has none
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                row = fcntl.ioctl(asked, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(row[20:24]) == wanted:
                    return name
    return None


def is_loopback(address: str) -> bool:
    """Whether an address is one that no other node reaches.

    Parameters
    ----------
    address : str
        Of version 4 or 6.

    Examples
    --------
    >>> is_loopback("127.0.1.1"), is_loopback("::ffff:127.0.0.1"), is_loopback("10.0.0.7")
    (True, True, False)
    """
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


@contextmanager
def connecting_by(interface: str | None) -> Iterator[None]:
    """Let gloo take an interface, unless the user has named one.

    Parameters
    ----------
    interface : str or None
        Its name; None leaves the choice to gloo.
    """
    if interface is None or _CHOSEN in os.environ:
        yield
        return
    os.environ[_CHOSEN] = interface
    try:
        yield
    finally:
        del os.environ[_CHOSEN]
