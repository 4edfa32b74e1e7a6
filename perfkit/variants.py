"""What if: a platform with more nodes, another device, another link or host, and what that makes of its fits."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from perfkit.communication import split_key
from perfkit.datasheets import Datasheet, list_datasheets, read_datasheet
from perfkit.estimates import TRANSFERRED
from perfkit.fitting import Fit
from perfkit.hardware import DTYPES, Device, Link, Network, Quantity
from perfkit.models.collectives import ring_steps
from perfkit.platform_file import PlatformError, find_file
from perfkit.units import check_choice, check_positive, check_type, format_rate, format_time

__all__ = ["Variants"]

#: What carrying kernels over to another device adds to their spread: GEMM models of the A100 and the H100, each priced
#: with the other's datasheet, are off by +20 and -9 % on average (aiconfigurator-core 0.12.0, bf16, M, N, K >= 512).
DEVICE_DOUBT = 0.15
#: What it adds to collectives: nothing but 6 % where the link is as fast as before (H100 and H200: 4 %), else start-ups
#: that differ by 46 % with hosts and library (A100 and H100) and matter less the longer the transfer takes.
SAME_LINK_DOUBT, START_DOUBT = 0.06, 0.3
#: Start-ups that a transfer lasts where that doubt is `START_DOUBT`; spread falls with the fifth root of time.
DOUBT_AT = (0.46 / START_DOUBT) ** 5
#: Share of the logarithm of a change of bandwidth or latency that may not arrive: 0.12 of log 1.5, A100 to H100.
SCALE_DOUBT = 0.3
#: Latency between nodes where no log tells it.
HOP = Quantity(7.67e-6, "s", "assumed", "as 10 nodes with one H100 each on InfiniBand, see platform h100-sxm-8x8")
_SHOWN = {"bandwidth": lambda value: format_rate(value, "B/s"), "latency": format_time}


class Machine(Protocol):
    """What a platform holds, as far as its variants go."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> Device: ...
    @property
    def network(self) -> Network: ...
    @property
    def kernels(self) -> Mapping[str, Fit]: ...
    @property
    def collectives(self) -> Mapping[str, Fit]: ...
    @property
    def host(self) -> Mapping[str, Quantity]: ...
    @property
    def context(self) -> Mapping[str, Fit]: ...
    @property
    def provenance(self) -> Mapping[str, str]: ...
    @classmethod
    def load(cls, path: str | Path) -> Any: ...


M = TypeVar("M", bound=Machine)


class Variants:
    """The what-if methods of a platform; each hands back a new platform that can be saved and says what it was."""

    def with_nodes(self: M, nodes: int) -> M:
        """Take more or fewer nodes of the same kind.

        Parameters
        ----------
        nodes : int
            Nodes [-].

        Returns
        -------
        variant : Platform
            The platform with so many nodes; its collectives between nodes are composed, see `Platform.collective`.
            Where nothing is known of the links between them, they are the network adapters of the device's datasheet.

        Raises
        ------
        ValueError
            For several nodes where nothing is known of the links between them, not even by a datasheet.

        Examples
        --------
        >>> from perfkit.gallery import load_platform
        >>> cluster = load_platform("h100-sxm-8").with_nodes(4)
        >>> cluster.network.ranks, cluster.network.links["inter"].bandwidth.value
        (32, 50000000000.0)
        """
        nodes, before = check_positive("nodes", nodes, integer=True), self.network.nodes
        links, change, adapters = self.network.links, f"{nodes} nodes instead of {before}", ""
        if nodes > 1 and "inter" not in links and not any(split_key(key)[2] == "rail" for key in self.collectives):
            links = {**links, "inter": _find_adapter(self)}
            change += ", linked by the network adapters of the datasheet"
            adapters = " by datasheet"  # a platform of the gallery with this name may know its links better
        gallery = re.fullmatch(rf"([^\s,]*-\d+?)(?:x{before})?", self.name)
        stem = gallery[1] if gallery else self.name.removesuffix(f", {before} nodes")
        suffix = "" if nodes == 1 else f"x{nodes}" if gallery else f", {nodes} nodes"
        return _derive(self, stem + suffix + adapters, change, network=replace(self.network, nodes=nodes, links=links))

    def with_datasheet(self: M, other: "M | Datasheet | Device | str") -> M:
        """Take another device: keep what was fitted as shares of a datasheet's numbers, and swap those numbers.

        Parameters
        ----------
        other : Platform, Datasheet, Device or str
            Whose peaks, memories and links to take; a name is one of `perfkit.datasheets.list_datasheets`, a platform
            of the gallery or a file.

        Returns
        -------
        variant : Platform
            Launch times, efficiencies and sharpness as here; time per byte of collectives in inverse proportion to the
            bandwidth of the link, start-ups as here; the layout of the network as here. All of it is ``assumed``, warns
            that it was transferred, and has a wider interval.

        Raises
        ------
        ValueError
            For a device of another kind, and for kernels that are not fitted as shares of a datasheet's numbers.

        Notes
        -----
        What is added to the spread was chosen on A100 and H100, each priced with the other's datasheet, and judged on
        the rest of aiconfigurator-core 0.12.0. bf16 GEMMs of at least 512 in each size: mean error 8.5 % from H100 to
        H200, 12 % to B200, 9 % to B300, 23 % to L40S, and 13 to 19 % from A100 to these, where own fits leave 6 to 10
        %; 80 to 97 % of them lie inside the 80 % interval (on L40S 32 and 59 %), and 53 to 90 % of all shapes.
        Collectives on 2 to 8 ranks: mean error 6 % from H100 to H200, 26 to 28 % to B200, GB200 and B300, nearly all of
        it start-up, which takes a third less on Hopper nodes than on others; 11 to 12 % from A100 to those; 87 to 99 %
        of them inside the interval.

        Examples
        --------
        >>> from perfkit.gallery import load_platform
        >>> load_platform("h100-sxm-8").with_datasheet("h200-sxm").device.memory[-1].name
        'HBM3e'
        """
        name, device, links = _resolve(self, other)
        if device.kind != self.device.kind:
            raise ValueError(
                f"{name} is {device.kind}, {self.name} is {self.device.kind}; fits do not carry over between kinds"
            )
        # Transfers are the host's; what a tile holds is taken to be the same.
        shares = ("roofline", "tiled")
        absolute = [key for key, fit in self.kernels.items() if fit.form not in shares and key != "transfer"]
        if absolute:
            raise ValueError(
                f"platform {self.name!r} holds seconds per byte for {absolute[0]}, not shares of a datasheet's "
                "numbers; calibrate on the other device instead"
            )
        change = f"datasheet of {name} instead of {self.device.name}"
        note = f"{TRANSFERRED}{self.name}: {change}"
        kernels = {key: _carry(fit, note, DEVICE_DOUBT) for key, fit in self.kernels.items() if _fits(key, device)}
        context = {key: _carry(fit, note, DEVICE_DOUBT) for key, fit in self.context.items() if fit.form != "caches"}
        ours, local = self.network.links, self.network.ranks_per_node
        collectives = {
            key: _switch(key, fit, ours.get(name), links.get(name), local, note)
            for key, fit in self.collectives.items()
            for name in (_link_of(key, local),)
        }
        return _derive(
            self, f"{name} from {self.name}", change, device=device, kernels=kernels, collectives=collectives,
            context=context, network=replace(self.network, links={**ours, **links}),
        )  # fmt: skip

    def with_link(self: M, name: str, *, bandwidth: float | None = None, latency: float | None = None) -> M:
        """Take a faster or slower link, or add the one between nodes.

        Parameters
        ----------
        name : str
            ``intra`` within a node, ``inter`` between nodes [-].
        bandwidth : float, optional
            One way, per rank; as before if not given [B/s].
        latency : float, optional
            Time of one hop with a vanishing message; as before if not given [s].

        Returns
        -------
        variant : Platform
            Time per byte of the collectives over that link in inverse proportion to its bandwidth, start-ups longer or
            shorter by the change of latency times the steps of a ring; three tenths of the logarithm of either change
            are added to their spread.

        Raises
        ------
        ValueError
            For an unknown link, nothing to change, or a new link that is not described in full.

        Examples
        --------
        >>> from perfkit.gallery import load_platform
        >>> node = load_platform("h100-sxm-8")
        >>> slow = node.with_link("intra", bandwidth=225e9)
        >>> round(slow.collectives["all_gather.8"]["beta"] / node.collectives["all_gather.8"]["beta"], 6)
        2.0
        """
        check_choice("name", name, ("intra", "inter"))
        given = {"bandwidth": (bandwidth, "B/s"), "latency": (latency, "s")}
        new = {
            what: Quantity(check_positive(what, value), unit, "assumed", "what if")
            for what, (value, unit) in given.items()
            if value is not None
        }
        old, local = self.network.links.get(name), self.network.ranks_per_node
        fitted = [key for key in self.collectives if _link_of(key, local) == name]
        if old is None and fitted:
            raise ValueError(f"platform {self.name!r} does not know the {name} link that {fitted[0]} was fitted on")
        if not new or (old is None and len(new) < 2):
            need = f"both, platform {self.name!r} has no {name} link yet" if old is None else "one of them"
            raise ValueError(f"bandwidth [B/s, one way, per rank] and latency [s per hop] are missing; give {need}")
        link = replace(old, **new) if old else Link(**new)
        rates = [_SHOWN[what](quantity.value) for what, quantity in new.items()]
        change = f"{name} link of {' and '.join(rates)}"
        note = f"{TRANSFERRED}{self.name}: {change}"
        scaled = {key: _follow(key, self.collectives[key], old, link, local, note) for key in fitted if old}
        network = replace(self.network, links={**self.network.links, name: link})
        return _derive(
            self, f"{self.name}, {change}", change, network=network, collectives={**self.collectives, **scaled}
        )

    def with_host(self: M, scale: float) -> M:
        """Take a faster or slower host.

        Parameters
        ----------
        scale : float
            Factor on all host overheads: 0.5 for a host twice as fast, 0 for one that is never waited for, as with
            replayed graphs [-].

        Returns
        -------
        variant : Platform
            The platform with those overheads.

        Raises
        ------
        ValueError
            Where the platform knows no host overheads.

        Examples
        --------
        >>> from perfkit.gallery import load_platform
        >>> load_platform("h100-sxm-8").with_host(0).host["launch"].value
        0.0
        """
        scale = check_positive("scale", scale, zero=True)
        change = f"host overheads x {scale:g}"
        note, factors = f"{TRANSFERRED}{self.name}: {change}", {"per_operation": scale}
        host = {
            name: replace(q, value=scale * q.value, kind="assumed", stderr=None, source=f"{change}; {q.source}")
            for name, q in self.host.items()
        }
        timed = {key: _carry(fit, note, 0.0, factors) for key, fit in self.context.items() if "per_operation" in fit}
        if not host and not timed:
            raise ValueError(f"platform {self.name!r} knows no host overheads; calibrate it first")
        return _derive(self, f"{self.name}, {change}", change, host=host, context={**self.context, **timed})


def _derive(platform: M, name: str, change: str, **changes: Any) -> M:
    """Put in what changes, and write down where the platform comes from."""
    past = platform.provenance
    story = {"derived_from": past.get("derived_from", platform.name)}
    story["changes"] = "; ".join([past["changes"], change] if "changes" in past else [change])
    return replace(platform, name=name, provenance={**past, **story}, **changes)


def _find_adapter(platform: Machine) -> Link:
    """Link between nodes as the datasheet of the device tells it."""
    for sheet in map(read_datasheet, list_datasheets()):
        if sheet.device.name == platform.device.name and "NIC" in sheet.links:
            return Link(sheet.links["NIC"], HOP)
    raise ValueError(
        f"platform {platform.name!r} knows nothing between nodes; add a link first, such as "
        ".with_link('inter', bandwidth=50e9, latency=1e-6) for 400 Gb/s per rank"
    )


def _resolve(platform: Machine, other: Any) -> tuple[str, Device, dict[str, Link]]:
    """Name, device and links of what the user named."""
    check_type("other", other, type(platform) | Datasheet | Device | str | Path)
    if isinstance(other, str) and other in list_datasheets():
        other = read_datasheet(other)
    elif isinstance(other, str | Path):
        try:
            other = type(platform).load(find_file(other))
        except PlatformError as error:
            raise PlatformError(f"{error}; datasheets are {', '.join(list_datasheets())}") from None
    if isinstance(other, Device):
        return other.name, other, {}
    if not isinstance(other, Datasheet):
        return other.name, other.device, dict(other.network.links)
    rates = {"intra": other.links.get("NVLink", other.links.get("PCIe")), "inter": other.links.get("NIC")}
    ours = platform.network.links
    links = {name: replace(ours[name], bandwidth=rate) for name, rate in rates.items() if rate and name in ours}
    return other.system, other.device, links


def _fits(key: str, device: Device) -> bool:
    """Whether the device has the number format a kernel fit is for."""
    dtype = key.rpartition(".")[2]
    return dtype not in DTYPES or dtype in device.peaks


def _link_of(key: str, ranks_per_node: int) -> str:
    """Link that decides on a collective: between nodes, that is the one between them."""
    _, ranks, way = split_key(key)
    return "inter" if way == "rail" or (ranks or 0) > ranks_per_node else "intra"


def _start(key: str, fit: Fit, ranks_per_node: int) -> float:
    """Start-up time of a collective fit, above zero [s]."""
    operation, ranks, _ = split_key(key)
    if fit.form == "over_ranks":
        start = fit["alpha0"] + fit["alpha1"] * float(ring_steps(operation, ranks or ranks_per_node))
    else:
        start = min(value for name, value in fit.items() if name.startswith("alpha"))
    return max(start, 1e-9)


def _carry(fit: Fit, note: str, doubt: float, factors: Mapping[str, float] | None = None) -> Fit:
    """Carry a fit over: scaled parameters, a wider spread, and a note that says so."""
    scale = {name: next((f for stem, f in (factors or {}).items() if name.startswith(stem)), 1.0) for name in fit}
    return replace(
        fit, kind="assumed", spread=math.hypot(fit.spread, doubt), notes=(note, *fit.notes),
        parameters={name: value * scale[name] for name, value in fit.items()},
        stderr={name: error * scale[name] for name, error in fit.stderr.items()},
    )  # fmt: skip


def _switch(key: str, fit: Fit, old: Link | None, new: Link | None, ranks_per_node: int, note: str) -> Fit:
    """Carry a collective fit over to another device, whose link is another one too."""
    ratio = old.bandwidth.value / new.bandwidth.value if old and new else 1.0
    if ratio == 1:
        return _carry(fit, note, SAME_LINK_DOUBT)
    carried = _carry(fit, f"{note}, time per byte x {ratio:.3g}", START_DOUBT, {"beta": ratio})
    return replace(carried, spread_time=DOUBT_AT * _start(key, fit, ranks_per_node))


def _follow(key: str, fit: Fit, old: Link, new: Link, ranks_per_node: int, note: str) -> Fit:
    """Let a collective fit follow its link: time per byte with bandwidth, start-up with the steps that pay latency."""
    ratio, change = old.bandwidth.value / new.bandwidth.value, new.latency.value - old.latency.value
    operation, ranks, _ = split_key(key)
    law = fit.form == "over_ranks"
    steps = 1.0 if law else float(ring_steps(operation, ranks or ranks_per_node))
    least = min(new.latency.value / max(old.latency.value, 1e-12), 1.0)  # as if all of the start-up were hops
    starts = {
        name: max(value + steps * change, least * value)
        for name, value in fit.items()
        if name == "alpha1" or (name.startswith("alpha") and not law)
    }
    carried = _carry(replace(fit, parameters={**fit, **starts}), note, 0.0, {"beta": ratio})
    growth = _start(key, carried, ranks_per_node) / _start(key, fit, ranks_per_node)
    doubts = (fit.spread, SCALE_DOUBT * math.log(ratio), SCALE_DOUBT * math.log(growth))
    return replace(carried, spread=math.hypot(*doubts))
