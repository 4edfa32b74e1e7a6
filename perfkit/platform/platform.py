"""Platforms: what perfkit knows about a machine, and all that can be asked of it."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from perfkit.fitting.models import COLLECTIVES, KERNELS
from perfkit.ground.files import find_reference, reading
from perfkit.ground.hardware import Device
from perfkit.ground.results import Reported, Sections, Table
from perfkit.ground.units import (
    Array,
    Values,
    check_choice,
    check_positive,
    check_sizes,
    check_type,
    format_bytes,
    format_count,
    show,
)
from perfkit.platform import bandwidths, file, tables, whatif
from perfkit.platform.datasheets import Datasheet, list_datasheets, read_datasheet
from perfkit.platform.estimates import CollectiveTime, Estimate, warn_once
from perfkit.platform.machine import Machine, PlatformError, list_numbers
from perfkit.platform.single_kernels import estimate_gemm, estimate_lookups, time_kernels
from perfkit.platform.unmeasured import put_on_datasheet

if TYPE_CHECKING:
    import altair

    from perfkit.platform.collective_costs import CollectiveCost

#: Pictures of a platform.
CHARTS = ("node", "bandwidths")


@dataclass(frozen=True)
class Platform(Machine, Reported):
    """Everything perfkit knows about a machine or a cluster.

    Parameters
    ----------
    name : str
        Name shown in results [-].
    device : Device
        What one rank computes on [-].
    network : Network
        How the ranks are connected [-].
    kernels : mapping of str to Fit, optional
        Kernel models by operation class [-].
    collectives : mapping of str to Fit, optional
        Collective models by ``operation.ranks``, such as ``all_reduce.8`` [-].
    host : mapping of str to Quantity, optional
        Host overheads: ``gap`` (T1), ``before_launch`` (T2), ``after_launch`` (T3), ``launch`` (T4)
        and ``between_launches`` (T5) [s].
    context : Context, optional
        What real iterations add to isolated kernels and collectives [-].
    provenance : mapping of str to str, optional
        Machine, versions and dates of a calibration [-].
    host_memory : HostMemory, optional
        Memory of the host, if it is not the usual one of the device, see `with_host_memory` [-].
    origin : Origin, optional
        The file that `load_platform` read it from [-].

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> platform = load_platform("h100-sxm-8")
    >>> platform.collective("all_reduce", 64e6, ranks=8)
    Estimate(314 µs, 80 % within 290 µs to 340 µs)
    """

    report_title = "Everything perfkit knows about a machine or a cluster"

    def collective_time(
        self,
        operation: str,
        nbytes: Values,
        *,
        ranks: int,
        algorithm: str | None = None,
        nodes: int | None = None,
    ) -> Array:
        """Time of collectives of one operation, for arrays of sizes and without warnings.

        Parameters
        ----------
        operation : str
            Operation, such as ``all_reduce`` [-].
        nbytes : float or array
            Message sizes in the nccl-tests convention [B].
        ranks : int
            Ranks taking part [-].
        algorithm : str, optional
            ``ring``, ``tree``, ``in_network``, ``two_level`` (a share on each rail between
            nodes, and inside nodes) or
            ``rail`` (one rank of each node); by default the one of `with_algorithm`, else what the
            library chose when it was measured [-].
        nodes : int, optional
            Nodes that the ranks are on, equally many on each: 4 with 8 ranks is two of each of four
            nodes. By default they fill one node after the other [-].

        Returns
        -------
        time : array
            One time per size [s].

        Raises
        ------
        ValueError
            For an operation or algorithm without a model, more ranks or nodes than the network has, or
            ranks that are not equally many on each of `nodes`.
        """
        sizes = np.asarray(check_sizes("nbytes", nbytes), dtype=float)
        return self._find_cost(operation, ranks, algorithm, nodes).time(sizes)

    def collective(
        self,
        operation: str,
        nbytes: float,
        *,
        ranks: int,
        algorithm: str | None = None,
        nodes: int | None = None,
    ) -> Estimate:
        """Time of one collective.

        Parameters
        ----------
        operation : str
            Operation, such as ``all_reduce`` [-].
        nbytes : float
            Message size in the nccl-tests convention: the full buffer of a rank [B].
        ranks : int
            Ranks taking part [-].
        algorithm : str, optional
            ``ring``, ``tree``, ``in_network``, ``two_level`` (a share on each rail between
            nodes, and inside nodes) or
            ``rail`` (one rank of each node); by default the one of `with_algorithm`, else what the
            library chose when it was measured [-].
        nodes : int, optional
            Nodes that the ranks are on, equally many on each: 4 with 8 ranks is two of each of four
            nodes. By default they fill one node after the other [-].

        Returns
        -------
        estimate : Estimate
            Predicted time with interval and parts [s].

        Raises
        ------
        ValueError
            For an operation or algorithm without a model, a size below 0 or more ranks than the
            network has.

        Notes
        -----
        A fitted rank count takes its own fit. Another one takes the law over rank counts; else the
        geometric mean of the counts below and above it, or the nearest count, scaled as its
        algorithm does. A collective across nodes that was not measured is composed of its stages
        inside and between nodes, see `perfkit.models.hierarchy`. Some ranks of each of several nodes are
        priced as nodes of so many: each has its own rail, whatever the others send at that time
        (docs/formulas.md, below table 1.1). An algorithm that was asked for
        and not measured takes its textbook form. All of these have a wider interval and a warning,
        which names the one measurement that would help most.
        """
        size = check_positive("nbytes", nbytes, zero=True)
        sizes = check_sizes("nbytes", size)
        found = self.price_collective(operation, sizes, ranks, algorithm, nodes)
        where = f"{ranks} ranks of {self.name}"
        if nodes is not None:
            where = f"{ranks} ranks on {nodes} nodes of {self.name}"
        title = f"{operation} of {format_bytes(size)} on {where}: {found.formula}"
        terms = {name: float(part) for name, part in found.terms.items()}
        return Estimate(
            float(found.time), float(found.spread), terms, title, warn_once(found.notes, 3)
        )

    def price_collective(
        self,
        operation: str,
        nbytes: Array,
        ranks: int,
        algorithm: str | None = None,
        nodes: int | None = None,
    ) -> CollectiveTime:
        """Price collectives as `collective_time` does, with parts, spread and warnings.

        Parameters
        ----------
        operation : str
            Operation, such as ``all_reduce`` [-].
        nbytes : array
            Message sizes in the nccl-tests convention [B].
        ranks : int
            Ranks taking part [-].
        algorithm : str, optional
            As in `collective_time` [-].
        nodes : int, optional
            As in `collective_time` [-].

        Returns
        -------
        time : CollectiveTime
            One time per size with its parts [s]. `collective` says which fit is taken when.
            Composed times are never below what the links allow.

        Raises
        ------
        ValueError
            As `collective_time` does.
        """
        sizes = np.asarray(nbytes, dtype=float)
        return self._find_cost(operation, ranks, algorithm, nodes).price(sizes)

    def _find_cost(
        self, operation: str, ranks: int, algorithm: str | None, nodes: int | None
    ) -> "CollectiveCost":
        """What prices a collective of ranks that fill one node after the other, or are on so many."""
        # only exchanges need them
        if nodes is None:
            from perfkit.platform.collectives import find_cost

            return find_cost(self, operation, ranks, algorithm)
        from perfkit.platform.spread_ranks import find_spread_cost

        return find_spread_cost(self, operation, ranks, nodes, algorithm)

    def kernel_time(
        self, kind: str, features: Mapping[str, Values], *, dtype: str = "fp32"
    ) -> Array:
        """Times of kernels of one class, alone on the device, for arrays of sizes and without warnings.

        Parameters
        ----------
        kind : str
            Operation class or a key of `Platform.kernels` [-].
        features : mapping of str to float or array
            Sizes by name, in base units: ``flops``, ``nbytes`` and what the form of the class
            needs. ``working_set`` [B] decides on the level of memory; it is ``nbytes`` if not
            given. ``peak`` [FLOP/s] and ``bandwidth`` [B/s] replace those of the device.
        dtype : str, optional
            Number format whose peak applies [-].

        Returns
        -------
        time : array
            One time per element of the features [s].

        Raises
        ------
        ValueError
            For a class without a model, or a dtype without a peak.

        Notes
        -----
        Predictions of iterations take the same times, see `gemm` for what surrounds a kernel there.
        A class without a model is refused here; predictions take a similar class or the bytes
        moved, and warn.
        """
        return time_kernels(self, kind, features, dtype=dtype)

    def gemm(self, m: int, n: int, k: int, *, dtype: str = "fp32", batch: int = 1) -> Estimate:
        """Time of a matrix product y[m, n] = x[m, k] w[k, n], alone on the device.

        Parameters
        ----------
        m, n, k : int
            Rows, columns and inner size [-].
        dtype : str, optional
            Number format, one of the device's peaks [-].
        batch : int, optional
            Products in one kernel; above 1 the class is ``bmm`` [-].

        Returns
        -------
        estimate : Estimate
            Predicted time with interval and parts [s].

        Raises
        ------
        ValueError
            For sizes that are not whole numbers above 0, and for an unknown dtype.

        Notes
        -----
        The operands lie in memory as they are written, the layout ``nn``. The product runs again
        and again, so that each level of memory holds what fits into it; a GPU whose cache has no
        known bandwidth reads all from its main memory.

        The same product in a prediction takes this time, and beyond it: what iterations add
        (``context.kernels`` of the platform: a factor on the time, one on what distant operands
        add, and a time of each call); operands that other operations have driven out of the
        caches; and its own layout, such as ``nt``. A collective beside it slows it down
        (`perfkit.prediction.simulation`). `Prediction.explain_operation` lists these steps for one
        operation.

        Examples
        --------
        >>> from perfkit.platform.gallery import load_platform
        >>> load_platform("h100-sxm-8").gemm(4096, 4096, 1024, dtype="bf16")
        Estimate(51.1 µs, 80 % within 43.9 µs to 59.5 µs)
        """
        return estimate_gemm(self, m, n, k, dtype=dtype, batch=batch)

    def lookup(self, tables: Sequence[Any], *, batch: int) -> Estimate:
        """Time of the forward lookups of embedding tables, one kernel after another, alone on the
        device.

        Parameters
        ----------
        tables : sequence of Table
            Tables with ``rows``, ``dim``, ``pooling``, ``results``, ``distribution``, ``itemsize`` and ``row_bytes`` [-].
        batch : int
            Samples [-].

        Returns
        -------
        estimate : Estimate
            Predicted time with interval and parts [s].

        Raises
        ------
        ValueError
            For a batch that is not a whole number above 0, or no table.

        Notes
        -----
        It is the kernel of ``EmbeddingBag``. Caches hold rows of these tables alone; in a prediction,
        the other operands of an iteration and, on a CPU, the other ranks take a part of them, and
        what iterations add comes on top, as with `gemm`.
        """
        return estimate_lookups(self, tables, batch=batch)

    def with_nodes(
        self,
        nodes: int,
        *,
        ranks_per_node: int | None = None,
        regions: int | None = None,
        network: str | None = None,
    ) -> "Platform":
        """Take more or fewer nodes of the same kind.

        Parameters
        ----------
        nodes : int
            Nodes [-].
        ranks_per_node : int, optional
            Ranks of a node; unchanged if not given. Collectives of more ranks than either node has
            are left out [-].
        regions : int, optional
            Regions of equally many nodes, which the link ``far`` connects; unchanged if not given
            [-].
        network : str, optional
            Network of a provider that joins the nodes, such as ``p5``, ``nd-h100-v5``, ``a3-mega`` or
            ``dgx-h100``, see `perfkit.fabrics`. Each rank has its share of the adapters of a whole
            node; collectives that were measured between nodes follow this link, as with `with_link` [-].

        Returns
        -------
        variant : Platform
            The platform with so many nodes; collectives between them are composed, see
            `Platform.collective`. An unknown link between nodes is taken from the network adapters
            in the datasheet of the device. A platform of the gallery that was measured between nodes,
            as ``h100-sxm-8x64``, is some per cent slower than ``h100-sxm-8`` with 64 nodes: its link and
            start-ups are those that were seen.

        Raises
        ------
        ValueError
            For several nodes without a link between them, in the platform or in a datasheet; for
            regions that do not divide the nodes; for an unknown network.

        Examples
        --------
        >>> from perfkit.platform.gallery import load_platform
        >>> cluster = load_platform("h100-sxm-8").with_nodes(4)
        >>> cluster.network.ranks, cluster.network.links["inter"].bandwidth.value
        (32, 50000000000.0)

        64 nodes as AWS and as Google rent them:

        >>> [load_platform("h100-sxm-8").with_nodes(64, network=name).name for name in ("p5", "a3-mega")]
        ['h100-sxm-8x64@p5', 'h100-sxm-8x64@a3-mega']
        """
        return whatif.with_nodes(
            self, nodes, ranks_per_node=ranks_per_node, regions=regions, network=network
        )

    def with_datasheet(self, other: "Platform | Datasheet | Device | str | Path") -> "Platform":
        """Take another device: keep the fitted efficiencies, and replace the numbers of the datasheet.

        Parameters
        ----------
        other : Platform, Datasheet, Device, str or Path
            The source of peaks, memories and links; a name is one of
            `platform.datasheets.list_datasheets`, a platform of the gallery, or a file.

        Returns
        -------
        variant : Platform
            Launch times, efficiencies, start-ups and the layout of the network are unchanged; the
            time per byte of collectives follows the link. All is ``assumed``, warns that it was
            transferred, and has a wider interval.

        Raises
        ------
        ValueError
            For a device of another kind, and for kernels that were not fitted as efficiencies of a
            datasheet.

        Notes
        -----
        The extra spread was chosen on A100 and H100, each predicted with the datasheet of the
        other. On other GPUs, large bf16 GEMMs have mean errors of 8.5 to 23 % and collectives of 6
        to 28 % (docs/formulas.md, section 2).

        Examples
        --------
        >>> from perfkit.platform.gallery import load_platform
        >>> load_platform("h100-sxm-8").with_datasheet("h200-sxm").device.memory[-1].name
        'HBM3e'
        """
        check_type("other", other, Platform | Datasheet | Device | str | Path)
        if isinstance(other, str) and other in list_datasheets():
            return whatif.with_datasheet(self, read_datasheet(other))
        if not isinstance(other, str | Path):
            return whatif.with_datasheet(self, other)
        return whatif.with_datasheet(self, Platform.load(file.find_file(other)))

    def with_link(
        self, name: str, *, bandwidth: float | None = None, latency: float | None = None
    ) -> "Platform":
        """Take a faster or slower link, or add the link between nodes.

        Parameters
        ----------
        name : str
            ``intra`` within a node, ``inter`` between nodes, ``far`` between regions [-].
        bandwidth : float, optional
            One way, per rank; unchanged if not given [B/s].
        latency : float, optional
            Time of one hop of a message without bytes; unchanged if not given [s].

        Returns
        -------
        variant : Platform
            Collectives over that link: the time per byte follows the bandwidth, and the start-up
            changes by the latency times the steps of a ring. 0.3 times the logarithm of each change
            is added to their spread, in quadrature.

        Raises
        ------
        ValueError
            For an unknown link, nothing to change, or a new link without bandwidth or latency.

        Examples
        --------
        >>> from perfkit.platform.gallery import load_platform
        >>> node = load_platform("h100-sxm-8")
        >>> slow = node.with_link("intra", bandwidth=225e9)
        >>> round(slow.collectives["all_gather.8"]["beta"] / node.collectives["all_gather.8"]["beta"], 6)
        2.0
        """
        return whatif.with_link(self, name, bandwidth=bandwidth, latency=latency)

    def with_host(self, scale: float) -> "Platform":
        """Take a faster or slower host.

        Parameters
        ----------
        scale : float
            Factor on all host overheads: 0.5 for a host twice as fast, 0 for no waiting, as with
            replayed graphs [-].

        Returns
        -------
        variant : Platform
            The platform with those overheads.

        Raises
        ------
        ValueError
            If the platform has no host overheads.

        Examples
        --------
        >>> from perfkit.platform.gallery import load_platform
        >>> load_platform("h100-sxm-8").with_host(0).host["launch"].value
        0.0
        """
        return whatif.with_host(self, scale)

    def with_host_memory(
        self,
        *,
        capacity: float | None = None,
        bandwidth: float | None = None,
        link: float | None = None,
        sharers: int | None = None,
    ) -> "Platform":
        """Take another memory of the host, to which strategies offload.

        Parameters
        ----------
        capacity : float, optional
            Memory of a node [B].
        bandwidth : float, optional
            Its peak bandwidth: that of all channels of the node [B/s].
        link : float, optional
            What one rank reaches between its device and pinned memory of the host, each way [B/s].
        sharers : int, optional
            Ranks of a node that share one link to the host, such as a PCIe switch [-].

        Returns
        -------
        variant : Platform
            The platform with that memory. What is not given stays that of the host that the device
            usually has. Where that is not known, the link is that of the datasheet, of which copies
            reach a share, and no ranks share it.

        Raises
        ------
        ValueError
            For a CPU, and if neither the arguments nor a usual host say how much memory there is,
            how fast it is and how it is linked.

        Examples
        --------
        >>> from perfkit.platform.gallery import load_platform
        >>> l40s = load_platform("l40s-8").with_host_memory(capacity=1e12, bandwidth=600e9)
        >>> l40s.host_memory.to_host.value / 1e9
        25.1
        """
        from perfkit.platform.host_memory import with_host_memory  # only offload needs it

        return with_host_memory(
            self, capacity=capacity, bandwidth=bandwidth, link=link, sharers=sharers
        )

    def with_algorithm(self, operation: str, algorithm: str | None) -> "Platform":
        """Choose the algorithm of a collective, for all that is asked of the platform and for all
        predictions on it.

        Parameters
        ----------
        operation : str
            Operation, such as ``all_reduce`` [-].
        algorithm : str or None
            One that has a time on this platform, such as ``ring`` or ``tree``, see `collective`;
            None leaves the choice to the library again [-].

        Returns
        -------
        variant : Platform
            Collectives of the operation take this algorithm, on any number of ranks: from its own
            fit, or its textbook form on the links, with a wider interval and a warning. Inside a
            node, ``two_level`` is what the library chooses there. Stages of other collectives, and
            a strategy that names its own algorithm, are unchanged.

        Raises
        ------
        ValueError
            For an operation that does not exist, and for an algorithm without a time on this
            platform. Where it has one inside nodes alone, or across them alone, collectives of
            other ranks are refused when they are asked for.

        Examples
        --------
        >>> import perfkit as pk
        >>> from perfkit.platform.estimates import keep_quiet
        >>> cluster = pk.load_platform("h100-sxm-8x4")
        >>> tree = cluster.with_algorithm("all_reduce", "tree")
        >>> bert = pk.Transformer.bert("bert-large", batch=256, dtype="bf16")
        >>> with keep_quiet():
        ...     tree.collective("all_reduce", 64e6, ranks=32)
        ...     [f"{pk.predict(bert, where, ranks=32).communication()['total_s'][0]:.4f} s" for where in (cluster, tree)]
        Estimate(428 µs, 80 % within 293 µs to 623 µs, 1 warning)
        ['0.0082 s', '0.0054 s']
        """
        return whatif.with_algorithm(self, operation, algorithm)

    def with_scale(self, **scales: float) -> "Platform":
        """Take faster or slower resources.

        Parameters
        ----------
        **scales : float
            Factors on the speed [-]: ``peak`` of the processor and its caches; ``memory``, the
            bandwidth of the main memory; ``intra``, ``inter`` and ``far``, the bandwidth of links
            inside and between nodes and between regions; ``latency`` of kernels and collectives,
            their start-ups; ``host``, its overheads. ``cache`` is a factor on the size of the
            caches.

        Returns
        -------
        variant : Platform
            Efficiencies are unchanged; times per byte, per operation and per start follow the
            resources. Spreads grow as in `with_link`. Transfers to and from the host are unchanged.

        Raises
        ------
        ValueError
            For a resource that the platform does not have, or a factor that is not above 0.

        Examples
        --------
        >>> from perfkit.platform.gallery import load_platform
        >>> load_platform("h100-sxm-8").with_scale(memory=1.2, peak=2).device.main_bandwidth / 1e12
        4.02
        """
        return whatif.with_scale(self, **scales)

    def with_power(self, watts: float) -> "Platform":
        """Cap the power of each device, as ``nvidia-smi -pl`` does.

        Parameters
        ----------
        watts : float
            Most that a device draws, from 70 to 100 % of what its datasheet states [W].

        Returns
        -------
        variant : Platform
            Arithmetic at the clock of `perfkit.models.kernels.capped_clock`, as work that draws the
            full power has it; memory, links and host are unchanged. Another bin of memory is
            `with_scale`, such as ``memory=2.4 / 3.35`` for an H100 with HBM2e of 2.4 TB/s.

        Raises
        ------
        ValueError
            For a device whose datasheet states no power, for a cap outside that range, and for a
            platform whose arithmetic is slower than its datasheet, as with a cap.

        Examples
        --------
        >>> from perfkit.platform.gallery import load_platform
        >>> capped = load_platform("h100-sxm-8").with_power(500)
        >>> capped.name, round(capped.device.peaks["bf16"].value / 989.4e12, 3)
        ('h100-sxm-8, power cap of 500 W', 0.863)
        """
        return whatif.with_power(self, watts)

    @classmethod
    def from_datasheet(
        cls,
        name: str,
        *,
        flops: Mapping[str, float] | None = None,
        memory: tuple[float, float] | None = None,
        link: float | None = None,
        ranks: int | None = None,
        efficiency: float | None = None,
    ) -> Self:
        """Describe one node of a device that was not measured, with the efficiencies of measured
        devices or with one of your own.

        Parameters
        ----------
        name : str
            One of `platform.datasheets.list_datasheets`, with or without a number of ranks, such as
            ``mi300x-8``; any name where `flops` and `memory` are given [-].
        flops : mapping of str to float, optional
            Peak by number format, dense [FLOP/s].
        memory : (float, float), optional
            Capacity [B] and bandwidth, reads and writes together [B/s].
        link : float, optional
            Bandwidth between the ranks of the node, one way, per rank; that of the datasheet if not
            given [B/s].
        ranks : int, optional
            Ranks of the node; by default the number in the name, else 1 [-].
        efficiency : float, optional
            Share of the peak, of the memory bandwidth and of the link that everything reaches, up to
            1 [-]. It makes the simplest roofline there is: a kernel takes the longer of FLOP over
            peak and bytes over bandwidth; a collective takes the latency of the link for each step
            of a ring and its bytes over the link (Williams 2009, doi:10.1145/1498765.1498785;
            Hockney 1994, doi:10.1016/S0167-8191(06)80021-9). Launches, the host and caches take no
            time. Intervals stay those of a device that nobody measured.

        Returns
        -------
        platform : Platform
            Unless `efficiency` is given: shares of peak, bandwidth and link are the median of the measured devices, with
            intervals as wide as their differences; products take a rate that others measured on the
            device, if there is one. All of it is ``assumed``. No time is below FLOP over peak or
            bytes over bandwidth. Host overheads are published for another machine.

        Raises
        ------
        ValueError
            For an unknown datasheet, for numbers that are not above 0, and for several ranks
            without a link.

        Examples
        --------
        >>> from perfkit.platform.platform import Platform
        >>> mine = Platform.from_datasheet("mine", flops={"bf16": 4e14}, memory=(96e9, 3e12), link=450e9, ranks=8)
        >>> mine.network.ranks, mine.kernels["gemm"].kind
        (8, 'assumed')

        A product of 4096 by 4096 by 4096 numbers has 2 · 4096³ FLOP, and 200 TFLOP/s are reached:

        >>> simple = Platform.from_datasheet("mine", flops={"bf16": 4e14}, memory=(96e9, 3e12), efficiency=0.5)
        >>> round(simple.gemm(4096, 4096, 4096, dtype="bf16").time * 1e6), round(2 * 4096**3 / 200e12 * 1e6)
        (687, 687)
        """
        typical = cls.load(find_reference("typical.toml"))
        return put_on_datasheet(
            typical,
            name,
            flops=flops,
            memory=memory,
            link=link,
            ranks=ranks,
            efficiency=efficiency,
        )

    def to_toml(self) -> str:
        """Write the platform as TOML, losslessly.

        Raises
        ------
        PlatformError
            For fits without a source or units.
        """
        return file.write(self)

    def save(self, path: str | Path) -> Path:
        """Write the platform to a file, completely or not at all; an existing file is replaced.

        Parameters
        ----------
        path : str or Path
            The file, which ends in ``.toml`` [-].

        Raises
        ------
        PlatformError
            For a platform that could not be read back.
        OSError
            Where the file cannot be written.
        """
        return file.save(self, path)

    def numbers(self) -> Table:
        """Every number of the platform: a frame with the columns of
        `perfkit.platform.machine.Number`, each value in the unit of its row."""
        return tables.tabulate_numbers(self)

    def bandwidths(self) -> Table:
        """How fast a byte moves to one rank: a frame with a row for each memory and link, from near
        to far, and the columns of `perfkit.platform.bandwidths.Way`.

        Of a memory reads and writes together; of a link one way, for one rank. The host of a GPU is
        the usual one of that device, unless `with_host_memory` says which.

        Examples
        --------
        >>> from perfkit.platform.gallery import load_platform
        >>> load_platform("h100-sxm-8x8").bandwidths().select("way", "leads_to", "evidence")
        way                         leads_to   evidence
        L2               cache of the device    assumed
        HBM3            memory of the device  datasheet
        NVLink             ranks of the node  datasheet
        PCIe from host    memory of the host   measured
        adapter                  other nodes     fitted
        """
        return bandwidths.tabulate_bandwidths(self)

    def chart(self, kind: str = "node") -> "altair.LayerChart":
        """A picture of the platform.

        Parameters
        ----------
        kind : str, optional
            ``node``, a drawing of one node with its rates, or ``bandwidths``, those of `bandwidths` on
            a logarithmic axis.
        """
        from perfkit import plots

        check_choice("kind", kind, CHARTS)
        if kind == "bandwidths":
            return plots.bandwidth_ladder(self.bandwidths(), title=f"Bandwidths of {self.name}")
        return plots.draw_node(
            self.device,
            self.network,
            host=bandwidths.find_host(self),
            host_link=f"{bandwidths.name_host_link(self)} from host",
            multiprocessors=bandwidths.count_multiprocessors(self),
            title=f"A node of {self.name}",
        )

    def sections(self) -> Sections:
        """Sections of a report: rooflines, curves of collectives, assumptions, provenance, and
        every number."""
        return tables.list_sections(self)

    def explain(self) -> str:
        """Where each number comes from, in words: its kind (measured, fitted, from a datasheet or
        assumed), source and date, and its value with the standard error.

        The spread of a fit, the standard deviation of ln(measured / predicted), is one of its
        numbers. `numbers` has the same as a frame.

        Returns
        -------
        text : str
            A line for each source, and below it a line for each number.

        Examples
        --------
        >>> import perfkit as pk
        >>> lines = pk.load_platform("h100-sxm-8").explain().splitlines()
        >>> lines[0].partition(" numbers")[2], any(line.startswith("datasheet") for line in lines)
        (' come from', True)
        """
        return tables.explain_numbers(self)

    @classmethod
    def from_toml(cls, text: str, *, origin: str = "platform file") -> Self:
        """Read a platform from TOML; `PlatformError` says where it is wrong.

        Parameters
        ----------
        text : str
            The file's content [-].
        origin : str, optional
            Name of the file in errors [-].
        """
        from perfkit.ground.schemas import convert  # msgspec takes time to import
        from perfkit.platform import schema

        if not isinstance(text, str):
            raise PlatformError(
                f"text is {show(text)}; it must be the content of a platform file, a str; "
                "Platform.load takes its name"
            )
        with reading(origin, f"compare with {file.EXAMPLE}", error=PlatformError):
            tables = convert(file.parse(text), schema.PlatformFile)
            platform = cls(
                name=tables.name,
                device=schema.make_device(tables.device),
                network=schema.make_network(tables.network),
                kernels=schema.make_fits("kernels", tables.kernels, KERNELS),
                collectives=schema.make_fits("collectives", tables.collectives, COLLECTIVES),
                host=schema.make_quantities(tables.host),
                context=schema.make_context(tables.context),
                host_memory=schema.make_host_memory(tables.host_memory),
                provenance=tables.provenance,
            )
            schema.check_units(tables)
            return platform

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a platform file; `PlatformError` says where it is wrong.

        Parameters
        ----------
        path : str or Path
            The file [-].
        """
        with reading(
            path,
            "pass the path of a platform file; `load_platform` takes names of the gallery as well",
            error=PlatformError,
            most=file.LARGEST_FILE,
        ):
            return cls.from_toml(Path(path).read_bytes().decode("utf-8-sig"), origin=str(path))

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        evidence = "/".join(sorted({number.kind for number in list_numbers(self)}))
        models = (
            f"{len(self.kernels)} kernel and {len(self.collectives)} collective models, {evidence}"
        )
        ranks = format_count(self.network.ranks, "rank")
        if self.network.regions > 1:
            ranks += f" in {self.network.regions} regions"
        return f"{self.name!r}: {ranks} of {self.device.name!r}, {models}"

    def __repr__(self) -> str:
        return f"Platform({self.headline()})"

    def _repr_html_(self) -> str:
        """One line; `explain` lists hundreds of numbers."""
        return f"<pre>{html.escape(repr(self))}</pre>"
