"""What ranks do with units of weights in shards, as PyTorch's `fully_shard` handles them: the operations
around the messages of a unit, for the programs of stages."""

from collections.abc import Sequence

import numpy as np

from perfkit.prediction.micro_batches import ON_SHARDS, count_shards
from perfkit.prediction.stage_blocks import KindOfPass
from perfkit.workloads.columns import HostCalls

#: What the host does for a kernel that a hook launches, without a call of its own.
IN_HOOK = HostCalls(launches=1)


class UnitRows:
    """Operations around the messages of one unit: a layer, or all weights of a chunk outside of layers.

    They are those of `perfkit.workloads.blocks.FSDPUnits`, which were recorded with the micro-batch as
    if a single rank held all shards.

    Parameters
    ----------
    kind : KindOfPass
        What was recorded of layers of this kind.
    regions : sequence of str
        Regions of the model whose weights the unit holds: ``layers``, or one or both of ``embeddings``
        and ``head``.
    """

    def __init__(self, kind: KindOfPass, regions: Sequence[str]) -> None:
        self.kind, self.table, self.sizes = kind, kind.table, kind.sizes
        self.regions = regions
        #: Its name in what was recorded, its module, and the share of the recorded unit that it is.
        self.name, self.module, self.part = "layers", "layers.0", 1.0
        weights = kind.weights
        if "layers" not in regions:
            self.name, self.module = "ends", regions[0]
            of_unit = sum(weights[region] for region in regions)
            self.part = of_unit / max(weights["embeddings"] + weights["head"], 1.0)
        #: Share of its numbers that a rank holds; experts are shared by fewer ranks.
        self.shard = 1.0 / kind.owners
        if self.name == "layers" and kind.s.shares_experts:
            experts = float(self.sizes.experts) / weights["layers"]
            sharers = float(self.sizes.sharers)
            self.shard = count_shards(1.0, experts, owners=kind.owners, sharers=sharers)

    def list_ahead(self, phase: str) -> list[int]:
        """Rows of the copies ahead of a message that gathers the weights. In the backward pass they are
        part of the call that unpacks the unit before."""
        ahead = []
        for row in self._find("gather", "forward"):
            if self.table.labels[row].name in ON_SHARDS:
                ahead.append(self._take_shard(row, phase, has_call=phase == "forward"))
        return ahead

    def list_unpacking(self, phase: str) -> list[int]:
        """Rows of the copies out of a message that gathered the weights."""
        name = "gather" if phase == "forward" else "regather"
        [recorded] = self._find(name, phase, "split_with_sizes_copy")
        calls = HostCalls(launches=1, calls=1, bare=self.table.host_calls[recorded].bare)
        unpacking = self.table.take(recorded, phase, self.module, calls, self.part)
        return [unpacking, *self._list_reorders(phase, 1.0)]

    def list_packing(self, *, is_first: bool) -> list[int]:
        """Rows of the copies into the message that reduces gradients, of the first micro-batch or of a
        later one; none where all weights are frozen."""
        recorded = self._find("scatter", "backward", "chunk_cat")
        if not recorded:
            return []
        calls = HostCalls(launches=1, calls=1, bare=self._count_calls_left(is_first=is_first))
        packing = self.table.take(
            recorded[0],
            "backward",
            self.module,
            calls,
            self.part,
            float(np.where(self.sizes.straight, 1.0, self.sizes.widened)),
        )
        wide = self.sizes.wide / self.sizes.itemsize
        reorders = self._list_reorders("backward", float(np.where(self.sizes.straight, 1.0, wide)))
        return [*reorders, packing]

    def list_behind_reduction(self, *, adds: bool) -> list[int]:
        """Rows behind the message that reduces gradients: shards are cast to the format of the
        optimizer, and added to those of earlier micro-batches if `adds`."""
        behind = []
        for row in self._find("scatter", "backward", "_to_copy"):
            behind.append(self._take_shard(row, "backward", has_call=False))
        if adds:
            for region in self.regions:
                for row in self.kind.list_sums(region):
                    added = self.table.take(
                        row,
                        "backward",
                        self.module,
                        IN_HOOK,
                        self.shard,
                        self.sizes.widened_sums,
                    )
                    behind.append(added)
        return behind

    def list_casts(self) -> list[int]:
        """Rows that cast the gradients of a micro-batch which are added up before they are reduced."""
        casts: list[int] = []
        for region in self.regions:
            for row in self.kind.list_casts(region):
                calls = IN_HOOK
                if not casts:
                    calls = HostCalls(
                        launches=1, calls=1, bare=self._count_calls_left(is_first=True)
                    )
                casts.append(self.table.take(row, "backward", self.module, calls))
        return casts

    def _count_calls_left(self, *, is_first: bool) -> float:
        """Calls without a kernel behind the backward pass of the regions of the unit [-]."""
        return sum(self.kind.calls_left[region, is_first] for region in self.regions)

    def _find(self, name: str, phase: str, operation: str = "") -> list[int]:
        """Rows that were recorded around a message of the unit, or those of an operation."""
        rows = self.table.find(f"exchange.{name}.{self.name}", phase, self.kind.number)
        if not operation:
            return rows
        return [row for row in rows if self.table.labels[row].name == operation]

    def _take_shard(self, row: int, phase: str, *, has_call: bool) -> int:
        """Row of an operation on the shards of this rank."""
        calls = self.table.host_calls[row] if has_call else IN_HOOK
        return self.table.take(row, phase, self.module, calls, self.part * self.shard)

    def _list_reorders(self, phase: str, widened: float) -> list[int]:
        """Rows that put experts into the order of ranks which do not divide them, or back, whose numbers
        have `widened` times the bytes of weights."""
        copies = int(self.sizes.reorders)
        if self.name != "layers" or not copies:
            return []
        [copied] = self._find("gather", "forward", "split_with_sizes_copy")
        factor = float(self.sizes.reordered) / copies / self.kind.weights["layers"]
        calls = HostCalls(launches=1, calls=1) if phase == "forward" else IN_HOOK
        copy = self.table.take(copied, phase, self.module, calls, factor, widened)
        return [copy for _ in range(copies)]
