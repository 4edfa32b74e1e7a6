"""How fast the machine is right now: three short calls, timed between whatever else is measured."""

import time
from collections.abc import Callable

import numpy as np

__all__ = ["Reference"]


class Reference:
    """A product, a stream and a gather that do the same work at every call.

    Parameters
    ----------
    device : str, optional
        Torch device.
    synchronize : callable, optional
        Waits for the device.

    Notes
    -----
    A product of 256 rows and columns (34 MFLOP), a pass over 8 MiB, read and written, and a gather of 32,768 rows of
    64 B from there: about 2 ms in all. What ran before must not matter: the product is called twice untimed and
    twice timed, the pass wanders through 256 MiB that no cache holds, and the gather meets what the pass has left.
    After a pause, small products or large streams their times differ by 1, 5 and 6 % on the machine they were made on.
    """

    def __init__(self, device: str = "cpu", synchronize: Callable[[], None] | None = None) -> None:
        import torch

        self._wait = synchronize or (lambda: None)
        self._wall, self._core, self._turn = 0.0, 0.0, 0
        rng = torch.Generator().manual_seed(0)
        a, b, c = (torch.rand(256, 256, generator=rng).to(device) for _ in range(3))
        parts = torch.ones(32, 2**17, 16, device=device)  # every page is touched: fresh ones fault when first met
        far, out = torch.randint(0, 2**17, (32768,), generator=rng).to(device), torch.empty(32768, 16, device=device)
        self._multiply: Callable[[], object] = lambda: torch.mm(a, b, out=c)
        self._add: Callable[[], object] = lambda: parts[self._turn % 32].add_(1.0)
        self._gather: Callable[[], object] = lambda: torch.index_select(parts[self._turn % 32], 0, far, out=out)

    def __call__(self) -> np.ndarray:
        """Run all three; returns the time of each [s]."""
        self._turn += 1
        self._multiply(), self._multiply(), self._wait()
        core, marks = time.thread_time(), [time.perf_counter()]
        for call in (self._multiply, self._multiply, self._add, self._gather):
            call()
            self._wait()
            marks.append(time.perf_counter())
        self._core += time.thread_time() - core
        self._wall += marks[-1] - marks[0]
        product, again, stream, gather = np.diff(marks)
        return np.array([(product + again) / 2, stream, gather])

    @property
    def core_share(self) -> float:
        """Share of a core that this thread got while its references ran; less than 0.97 tells of other load [-]."""
        return min(1.0, self._core / max(self._wall, 1e-9))
