"""Arguments of captures: devices and number formats as PyTorch takes them, and the training step of a
model that is given with its inputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from perfkit.ground.number_formats import read_dtype
from perfkit.ground.units import check_choice, check_positive, show
from perfkit.models.optimizers import find_optimizer
from perfkit.recording.modules import DTYPES, make_optimizer
from perfkit.workloads.vocabulary import walk_tensors

#: Rows of all tables of a model from which they are tables and no vocabulary [-].
MANY_ROWS = 1_000_000
DENSE_TABLES = (
    "embedding tables of {0} weights get dense gradients and an update of every row by {1}; fused tables, as in "
    "TorchRec, update only the rows in use: pk.DLRM(embedding='exact') or pk.shard"
)
COPIED_TABLES = (
    "DistributedDataParallel copies embedding tables of {0} weights to each of the {1} ranks, and averages their "
    "gradients; to split them over ranks use pk.shard"
)
OTHER_WEIGHTS = (
    "optimizer is a {0} of weights that the model does not have; build it from the weights of the model that is given, "
    "or give the class, as in optimizer=torch.optim.{0}"
)
WITH_CLOSURE = (
    "optimizer is {0}, whose step needs a closure that computes the loss again; write the step yourself, and give a "
    "function that returns it"
)


def read_device(device: Any) -> str:
    """The kind of a device that is named as in PyTorch.

    Parameters
    ----------
    device : str, torch.device or int
        Such as ``cuda``, ``cuda:0``, or the number of a GPU.

    Returns
    -------
    kind : str
        ``cpu`` or ``cuda``.

    Raises
    ------
    ValueError
        For another kind of device.

    Examples
    --------
    >>> read_device("cuda:1"), read_device(0), read_device(torch.device("cpu"))
    ('cuda', 'cuda', 'cpu')
    """
    if type(device) is int and device >= 0:
        return "cuda"
    if isinstance(device, torch.device):
        device = device.type
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        if colon and number.isdecimal():
            device = kind
    return check_choice("device", device, ("cpu", "cuda"))


def read_amp(amp: Any) -> str | None:
    """The number format of autocast: ``bf16`` or ``fp16``, also by PyTorch's name or as its dtype.

    Parameters
    ----------
    amp : str or torch.dtype, optional
        What was given.

    Returns
    -------
    format : str, optional
        perfkit's name; None without autocast.

    Raises
    ------
    ValueError
        For a format that autocast does not have.
    """
    return None if amp is None else read_dtype("amp", amp, ("bf16", "fp16"))


@dataclass(frozen=True)
class Training:
    """How a model is trained with its inputs.

    Parameters
    ----------
    inputs : tensor, sequence or mapping
        Arguments of the model.
    optimizer : str, type, callable or Optimizer
        What updates the weights.
    loss : callable, optional
        Computes the loss from the result of the model.
    amp : str, optional
        Number format of autocast.
    accumulate : int
        Micro-batches of one update [-].
    ranks : int
        Number of ranks [-].
    device : str
        ``cpu`` or ``cuda``.
    """

    inputs: Any
    optimizer: Any
    loss: Callable[[Any], Tensor] | None
    amp: str | None
    accumulate: int
    ranks: int
    device: str

    def __post_init__(self) -> None:
        check_positive("accumulate", self.accumulate, integer=True)
        if not (callable(self.optimizer) or isinstance(self.optimizer, Optimizer)):
            find_optimizer(self.optimizer, dense=True)

    def make_step(self, model: Any, notes: list[str]) -> Callable[[], None]:
        """The step of a model.

        Parameters
        ----------
        model : torch.nn.Module or callable
            A module, or what builds it.
        notes : list of str
            Receives what to say of its tables.

        Returns
        -------
        step : callable
            Forward, backward and update.

        Raises
        ------
        ValueError
            For what builds no module, and for an optimizer that cannot be built, is one of other weights,
        or needs a closure.
        """
        module = model if isinstance(model, nn.Module) else model()
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"make_step returned {show(module)}, and inputs are given; it must return the model, a torch.nn.Module"
            )
        module.train()
        updates = self._make_optimizer(module)
        if isinstance(updates, torch.optim.LBFGS):
            raise ValueError(WITH_CLOSURE.format(type(updates).__name__))
        notes += _describe_tables(module, type(updates).__name__.lower(), self.ranks)
        if self.ranks > 1:
            module = nn.parallel.DistributedDataParallel(module)
        scaler = torch.amp.GradScaler(self.device, enabled=self.amp == "fp16")

        def step() -> None:
            updates.zero_grad()
            for micro_batch in range(int(self.accumulate)):
                is_last = micro_batch == self.accumulate - 1
                with self._send(module, is_last):
                    found = self._find_loss(module)
                    if self.accumulate > 1:
                        found = found / self.accumulate
                    scaler.scale(found).backward()
            scaler.step(updates)
            scaler.update()

        return step

    def _make_optimizer(self, module: nn.Module) -> Optimizer:
        """The optimizer of the weights of a module."""
        given = self.optimizer
        if isinstance(given, str):
            return make_optimizer(given, module.parameters())
        if isinstance(given, Optimizer):
            own = set(map(id, module.parameters()))
            if not own.issuperset(map(id, _list_weights(given))):
                raise ValueError(OTHER_WEIGHTS.format(type(given).__name__))
            return given
        name = getattr(given, "__name__", show(given))
        try:
            made = given(module.parameters())
        except TypeError as error:
            raise ValueError(
                f"optimizer is {name}, which cannot be built from the weights alone ({error}); give its arguments, as in "
                f"optimizer=functools.partial({name}, lr=0.1)"
            ) from error
        if not isinstance(made, Optimizer):
            raise ValueError(
                f"optimizer is {name}, which made a {type(made).__name__}; it must make a torch.optim.Optimizer"
            )
        return made

    def _send(self, module: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """A context in which gradients of several ranks are averaged for the last micro-batch
        alone."""
        if is_last or not isinstance(module, nn.parallel.DistributedDataParallel):
            return nullcontext()
        return module.no_sync()

    def _find_loss(self, module: nn.Module) -> Tensor:
        """The loss of the inputs: forward pass and loss in autocast's region."""
        inputs = self.inputs
        region = torch.autocast(self.device, DTYPES[self.amp]) if self.amp else nullcontext()
        with region:
            if isinstance(inputs, Mapping):
                out = module(**inputs)
            else:
                out = module(*inputs) if isinstance(inputs, list | tuple) else module(inputs)
            found: Any = self.loss(out) if self.loss else getattr(out, "loss", None)
            if self.loss and not isinstance(found, Tensor):
                raise ValueError(
                    f"loss returned {show(found)}; it must return the loss, a tensor of one number"
                )
            if found is None:
                numbers = [t.float().mean() for t in walk_tensors(out) if t.is_floating_point()]
                found = sum(numbers[1:], start=numbers[0])
        return found


def _list_weights(optimizer: Optimizer) -> Iterator[Any]:
    """Weights of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _describe_tables(module: nn.Module, optimizer: str, ranks: int) -> list[str]:
    """What to say of large embedding tables in a model that is trained as it is."""
    tables = [
        each
        for each in module.modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.weight.requires_grad
    ]
    if sum(table.num_embeddings for table in tables) < MANY_ROWS:
        return []
    dense = sum(table.weight.numel() for table in tables if not table.sparse)
    count = sum(table.weight.numel() for table in tables)
    notes = []
    if dense:
        notes.append(DENSE_TABLES.format(f"{dense / 1e6:,.0f} M", optimizer))
    if ranks > 1:
        notes.append(COPIED_TABLES.format(f"{count / 1e6:,.0f} M", ranks))
    return notes
