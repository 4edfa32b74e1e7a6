"""A ladder of working sets, from the nearest cache to what memory and time allow: what a byte and a far row cost."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["LARGEST", "time_ladder"]

#: Largest working set that is timed [B]; a quarter of the free memory where that is less.
LARGEST = 2.0**31

_SMALLEST, _SWEEPS, _ROW = 2.0**14, 4, 64  # bytes; turns that every size has; bytes of a row


def time_ladder(
    *, largest: float, device: str = "cpu", synchronize: Callable[[], None] | None = None
) -> list[dict[str, Any]]:
    """Time streams through working sets of growing size and gathers of rows from them, sizes interleaved.

    Parameters
    ----------
    largest : float
        Largest working set [B].
    device : str, optional
        Torch device.
    synchronize : callable, optional
        Waits for the device.

    Returns
    -------
    rows : list of dict
        ``nbytes`` [B], and of every sweep the time of one pass that reads and writes the whole set, ``stream`` [s], and
        of one gathered row of 64 B, ``gather`` [s].
    """
    import torch

    wait = synchronize or (lambda: None)
    steps = np.arange(np.log2(_SMALLEST), np.log2(max(largest, 4 * _SMALLEST)) + 0.01, 0.5)
    whole = torch.zeros(int(2.0 ** steps[-1]) // _ROW, _ROW // 4, device=device)
    out, rng = torch.empty(4096, _ROW // 4, device=device), torch.Generator().manual_seed(0)
    rows: list[dict[str, Any]] = [
        {"nbytes": int(2.0**step) // _ROW * _ROW, "stream": [], "gather": []} for step in steps
    ]

    def clock(call: Callable[[], object], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        return (time.perf_counter() - start) / times

    for sweep in range(_SWEEPS):
        for row in rows[:: 1 if sweep % 2 == 0 else -1]:
            part = whole[: row["nbytes"] // _ROW]
            turns = max(1, int(4e6 / row["nbytes"]))
            clock(lambda part=part: part.add_(1.0), turns)  # type: ignore[misc]
            row["stream"].append(min(clock(lambda part=part: part.add_(1.0), turns) for _ in range(2)))  # type: ignore[misc]
            draws = [torch.randint(0, len(part), (4096,), generator=rng).to(device) for _ in range(3)]
            found = [clock(lambda i=i, part=part: torch.index_select(part, 0, i, out=out), 1) for i in draws]  # type: ignore[misc]
            row["gather"].append(min(found) / 4096)
    return rows
