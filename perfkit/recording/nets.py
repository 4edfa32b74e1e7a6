"""Convolutional nets and XLNet as workloads, captured from the modules that PyTorch runs."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from perfkit.ground.number_formats import read_dtype
from perfkit.ground.records import set_fields
from perfkit.ground.units import check_choice, check_positive
from perfkit.models.optimizers import find_optimizer
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.sizes import check_ranks
from perfkit.workloads.tape import ITEMSIZE

#: Workload family by net. Published as arXiv 1512.03385 (bottleneck blocks), 1409.1556, 1801.04381,
#: 1608.06993, 1512.00567, 1602.07360 and 1906.08237, in this order.
NETS = {
    "resnet": "convolution",
    "vgg": "convolution",
    "mobilenet": "convolution",
    "densenet": "convolution",
    "inception": "convolution",
    "squeezenet": "convolution",
    "xlnet": "xlnet",
}


@dataclass(frozen=True)
class Net:
    """One training iteration of a convolutional net or an XLNet: forward, cross entropy, backward,
    optimizer.

    On several ranks it is data-parallel. Its graph is captured, which needs torch.

    Parameters
    ----------
    name : str
        One of `NETS`.
    batch : int
        Images or sequences of one iteration over all ranks [-].
    size : int
        Pixels along an edge of the image, or tokens of a sequence [-].
    width : int
        Channels of the first stage, or hidden width; a multiple of 8 [-].
    depth : int
        Blocks of each stage, or layers [-].
    classes : int
        Classes, or words of the vocabulary [-].
    optimizer : str
        ``sgd``, which for nets has a momentum of 0.9, or another one that updates dense weights, as
        `perfkit.models.optimizers.list_optimizers` lists them.
    dtype : str
        Data type of weights, activations and gradients.
    overlap : bool
        Whether several ranks average gradients in buckets during the backward pass, or else all at
        once after it.

    Raises
    ------
    ValueError
        For an unknown name, and for a size that is not above zero or too small for the net.

    Examples
    --------
    >>> Net("resnet", batch=8, size=64, width=32, depth=1).description
    'resnet, batch 8, size 64, width 32, depth 1'
    """

    name: str
    batch: int
    size: int
    width: int
    depth: int
    classes: int = 100
    optimizer: str = "sgd"
    dtype: str = "fp32"
    overlap: bool = True

    def __post_init__(self) -> None:
        check_choice("name", self.name, NETS)
        for key in ("batch", "size", "width", "depth", "classes"):
            set_fields(self, **{key: int(check_positive(key, getattr(self, key), integer=True))})
        find_optimizer(self.optimizer, dense=True)
        set_fields(self, dtype=read_dtype("dtype", self.dtype, ITEMSIZE))
        if self.width % 8:
            raise ValueError(
                f"width is {self.width}; it must be a multiple of 8; take {-(-self.width // 8) * 8}"
            )
        if self.family == "convolution" and self.size < 32:
            raise ValueError(
                f"size is {self.size}; a convolutional net halves images of 32 pixels or more; take 32"
            )

    @property
    def family(self) -> str:
        """Workload family; platforms are calibrated by family."""
        return NETS[self.name]

    @property
    def description(self) -> str:
        """Name and sizes in words."""
        return f"{self.name}, batch {self.batch}, size {self.size}, width {self.width}, depth {self.depth}"

    def graphs(
        self, ranks: int = 1, plan: Plan | None = None, *, accelerator: bool = False
    ) -> tuple[Graph, ...]:
        """Graphs of one iteration, the same on every rank.

        Parameters
        ----------
        ranks : int
            Number of ranks [-].
        plan : None
            A net has no tables to place.
        accelerator : bool
            Whether it runs on a GPU, where the optimizer updates lists of tensors.

        Returns
        -------
        graphs : tuple of Graph
            One for each rank.

        Raises
        ------
        ValueError
            If the batch does not divide by the ranks, or if a plan is given.
        """
        ranks = check_ranks(self.batch, ranks, plan)
        graph = _record(self, ranks, "cuda" if accelerator else "cpu")
        return tuple(graph for _ in range(ranks))


@lru_cache(maxsize=64)
def _record(net: Net, ranks: int, device: str) -> Graph:
    """Capture the iteration of one rank."""
    from perfkit.recording.modules import build_step
    from perfkit.recording.steps import capture

    about: dict[str, Any] = {
        "ranks": ranks,
        "family": net.family,
        "name": net.name,
        "device": device,
    }
    return capture(lambda: build_step(net, ranks=ranks, device=device)[0], **about)
