"""A device in a file: it answers the probes of a plan from times that others have recorded, and never from a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfkit.ground.results import Table
from perfkit.measure.probes import Probe

#: Columns of sizes by stage: those of a product, and that of a message.
_SIZES = {"kernels": ("m", "n", "k"), "collectives": ("nbytes",)}
#: Largest distance from the wanted size to a recorded one, in each of the sizes, as a power of two [-].
_NEAR = 1.0


@dataclass(frozen=True)
class Recording:
    """Recorded times of one device and its cluster.

    Parameters
    ----------
    source : str
        Data id, for the fits.
    products : polars.DataFrame
        Matrix products: ``m``, ``n``, ``k``, ``dtype`` and ``seconds``; repeats are rows of the same sizes.
    collectives : polars.DataFrame
        ``operation``, ``ranks``, ``nodes``, ``dtype``, ``nbytes`` in the nccl-tests convention and ``seconds``.

    Examples
    --------
    >>> import polars
    >>> from perfkit.measure.probes import list_probes
    >>> times = polars.DataFrame({"m": [1000], "n": [1000], "k": [1000], "dtype": ["bf16"], "seconds": [1e-5]})
    >>> device = Recording("one product", times, polars.DataFrame())
    >>> plan = list_probes(["bf16"], memory=80e9, cache=50e6)
    >>> [answer["sizes"] for answer in device.answer(plan) if answer]
    [{'m': 1000.0, 'n': 1000.0, 'k': 1000.0}]
    """

    source: str
    products: Table
    collectives: Table

    def answer(self, probes: Sequence[Probe]) -> list[dict[str, Any] | None]:
        """Answer each probe with the recorded times of the nearest size, no size twice.

        Parameters
        ----------
        probes : sequence of Probe
            What to time; those of one group together.

        Returns
        -------
        answers : list of dict or None
            ``samples`` [s] and the recorded ``sizes``; None where nothing within a factor of two was recorded.
        """
        used: set[tuple[Any, ...]] = set()
        return [self._find(probe, used) for probe in probes]

    def _find(self, probe: Probe, used: set[tuple[Any, ...]]) -> dict[str, Any] | None:
        """Times of the nearest recorded size that was not used yet."""
        names, frame = _SIZES.get(probe.stage, ()), self.products if probe.kind == "gemm" else self.collectives
        about = {"dtype": probe.dtype, "operation": probe.kind, "ranks": probe.ranks, "nodes": probe.nodes}
        if not {*names} <= {*frame.columns} or not {*names} <= {*probe.sizes}:
            return None
        own = {name: value for name, value in about.items() if name in frame.columns}
        rows = frame.filter(**own)
        sizes, wanted = rows.select(names).to_numpy().astype(float), [float(probe.sizes[name]) for name in names]
        far = np.abs(np.log2(sizes / wanted)).max(axis=1, initial=0.0)
        for place in np.argsort(far, kind="stable"):
            found = sizes[place]
            key = (*own.items(), *found)
            if far[place] <= _NEAR and key not in used:
                used.add(key)
                samples = rows["seconds"].to_numpy()[(sizes == found).all(axis=1)]
                return {"samples": samples.tolist(), "sizes": dict(zip(names, found.tolist(), strict=True))}
        return None
