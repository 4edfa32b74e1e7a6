"""Rates of links that others have published for runs of nccl-tests, as shares of the line rate.

`reference_data/published/link_rates.csv` has the figures with their threads: what direct copies over
PCIe reach, what copies through the memory of the host reach, rings over NVLink, reductions in its
switches, and single network adapters.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from perfkit.ground.files import group_rows

#: One lane pair of Ethernet, as cards are sold [B/s].
ETHERNET = tuple(1e9 / 8 * rate for rate in (1, 10, 25, 40, 50, 100, 200, 400))
#: Share of an Ethernet frame that is payload of TCP, with 1,500 bytes in a packet: 1,448 of 1,538 [-].
#: IEEE 802.3 (preamble, header, check, gap: 38 bytes), RFC 791, 9293 and 7323 (52 bytes of headers).
TCP_SHARE = 1448 / 1538
#: Rates of network adapters, one way, as they are sold [B/s].
ADAPTER_LINES = tuple(1e9 / 8 * rate for rate in (25, 50, 100, 200, 400, 800))
#: PCIe of 16 lanes by generation, one way: transfers a second times lanes, 128 of 130 bits are data
#: (PCI Express Base Specification, revisions 3.0 to 5.0) [B/s].
PCIE_LINES = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}


class Path(StrEnum):
    """Ways of data that have published rates."""

    NVLINK_RING = "nvlink ring"
    NVLINK_SHARP = "nvlink sharp"
    PCIE = "pcie direct"
    HOST_MEMORY = "host memory"
    ADAPTER = "adapter"


@dataclass(frozen=True)
class Shares:
    """Shares of the line rate that were published.

    Parameters
    ----------
    low, high : float
        Smallest and largest share [-].
    """

    low: float
    high: float


@cache
def find_shares(path: Path) -> Shares:
    """Find the shares of the line rate that runs over a path have reached.

    Parameters
    ----------
    path : Path
        The way of the data.

    Returns
    -------
    shares : Shares
        The smallest and the largest published share [-].

    Examples
    --------
    >>> find_shares(Path.ADAPTER)
    Shares(low=0.9146, high=0.96)
    """
    rows = group_rows("path", "published", "link_rates.csv")[path]
    shares = [float(row["bandwidth"]) / float(row["line"]) for row in rows if row["line"]]
    return Shares(min(shares), max(shares))


def find_ethernet(rate: float) -> float | None:
    """Find the slowest Ethernet card that a rate of TCP fits through.

    Parameters
    ----------
    rate : float
        Rate of the data [B/s].

    Returns
    -------
    line : float or None
        Its line rate, one way [B/s]; None where no single card carries so much.

    Examples
    --------
    2.9 GB/s are 23 Gb/s, which need a card of 25 Gb/s:

    >>> find_ethernet(2.9e9) / 1e9 * 8
    25.0
    """
    fitting = [line for line in ETHERNET if rate <= TCP_SHARE * line]
    return min(fitting, default=None)
