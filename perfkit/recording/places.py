"""Where the tensors of a captured step are for its program: on the host, or on the GPU that the
capture stands for.

All tensors of a capture are stored on the CPU. So a program that asks for the device of a tensor
gets its answer here, and PyTorch itself gets the CPU.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from perfkit.recording.values import Values
from perfkit.workloads.vocabulary import walk_tensors

#: Folders of the packages that get the device on which tensors are really stored.
_INSIDE = tuple(
    f"{Path(sys.modules[name].__file__ or '').parent}{separator}"
    for name in ("torch", "perfkit")
    for separator in ("/", "\\")
)
#: The device that stores a fake tensor.
_STORED: Any = vars(FakeTensor)["device"].fget
#: Operations that may take tensors of the host and of the GPU at once, as those on lists may.
_MIXING = ("copy_", "index", "_index_put_impl_", "index_put", "index_put_")
#: Beginnings of the names of operations on lists of tensors.
LISTS = ("_foreach_", "_fused_")
#: The file of PyTorch that places tensors in ``with torch.device(...)``.
_DEVICE_CONTEXT = str(Path("torch", "utils", "_device.py"))
#: Modules of PyTorch, which are given the device of their weights.
_MODULES = str(Path(nn.__file__ or "").parent / "modules")


class Gpu(NamedTuple):
    """The GPU that a program is told of.

    Parameters
    ----------
    name : str
        Name of the product.
    memory : float
        Size of its memory [B].
    capability : tuple of int
        Major and minor number of its compute capability [-].
    per_node : int
        GPUs of a node [-].
    """

    name: str
    memory: float
    capability: tuple[int, int]
    per_node: int


#: A GPU such as an A100, of which most programs take the same way as on others.
NEUTRAL = Gpu("GPU", 80e9, (8, 0), 8)


def is_asked_by_program(frame: FrameType) -> bool:
    """Whether a call comes from the program or from a package that it uses, and not from PyTorch
    itself."""
    return not frame.f_code.co_filename.startswith(_INSIDE)


def is_own_device(frame: FrameType) -> bool:
    """Whether PyTorch makes a tensor beside another one, on whose device it is; modules rather
    pass on the device that the program names."""
    name = frame.f_code.co_filename
    return name.startswith(_INSIDE) and not name.startswith(_MODULES)


def is_number(device: Any) -> bool:
    """Whether a device is given by its number, as in ``device=rank``; it is a GPU then."""
    return isinstance(device, int) and not isinstance(device, bool)


def names_gpu(device: Any) -> bool:
    """Whether a device that the step names is a GPU."""
    if isinstance(device, str | torch.device):
        return torch.device(device).type not in ("cpu", "meta")
    return is_number(device)


def find_storing_device(device: Any, caller: FrameType) -> Any:
    """The device that stores a fake tensor: the CPU, as autograd knows only devices of this build
    of PyTorch.

    What the program makes on the meta device is stored there, too, as no tensor of a capture takes
    memory. PyTorch itself uses the meta device to work out results.
    """
    if is_number(device):
        return "cpu"
    if not isinstance(device, str | torch.device):
        return device
    of_context = caller.f_code.co_filename.endswith(_DEVICE_CONTEXT)
    if torch.device(device).type == "meta" and is_own_device(caller) and not of_context:
        return device
    return "cpu"


class Places:
    """Which tensors of a step are on the host, and which are on the GPU.

    A step that names no GPU runs on the GPU as a whole. In one that names a GPU, tensors that are
    made without a device stay on the host until they are moved.

    Parameters
    ----------
    values : Values
        It numbers storages.
    accelerator : bool
        Whether the step is recorded as it runs on a GPU.
    """

    def __init__(self, values: Values, accelerator: bool) -> None:
        self.accelerator = accelerator
        self.placing = False  # whether the tensors made now are placed on the GPU
        self.gpus: set[Any] = set()  # numbers of the GPUs that the step names; None for no number
        self.current = 0  # number of the GPU that the step has chosen by torch.cuda.set_device
        self.gpu = NEUTRAL  # what the program is told of it
        self.tells_packages = False  # whether installed packages are told of it, too
        #: What the program has read of a GPU that is not there, such as ``max_memory_allocated``.
        self.readings: set[str] = set()
        #: Storages that the step has copied from the GPU to the host, and computed from such copies.
        self.copies: set[int] = set()
        self._values = values
        self._unplaced: set[int] = set()  # storages made without a device
        self._computed: set[int] = set()  # storages of the host that the recorded call computed
        self._pinned: set[int] = set()  # storages in pinned memory of the host
        self._answers: dict[int, torch.device] = {}  # what programs were told, by number
        self._host = torch.device("cpu")

    # -- what a program is told

    def find_device(self, tensor: Tensor) -> torch.device:
        """The device of a tensor, as its program sees it in a capture for a GPU."""
        if self.is_on_host(tensor):
            return self._host
        return self.find_gpu()

    def answer(self, tensor: Any) -> torch.device:
        """What a fake tensor says of its device, to its program or to PyTorch itself."""
        stored: torch.device = _STORED(tensor)
        if stored.type == "meta" or not is_asked_by_program(sys._getframe(2)):
            return stored
        return self.find_device(tensor)

    def find_gpu(self) -> torch.device:
        """The GPU that the step uses."""
        numbers = self.gpus - {None}
        number = next(iter(numbers)) if len(numbers) == 1 else self.current
        if number not in self._answers:
            self._answers[number] = torch.device("cuda", number)
        return self._answers[number]

    def is_answer(self, device: Any) -> bool:
        """Whether a device that the step names is only what it was told of a tensor."""
        return device is self._host or any(device is told for told in self._answers.values())

    def means_host(self, device: Any) -> bool:
        """Whether a target of a copy is the CPU, and more than the device that scripts without a
        GPU choose."""
        if torch.device(device).type != "cpu":
            return False
        return isinstance(device, str) or bool(self.gpus) or self.is_answer(device)

    # -- what is known

    def name_gpu(self, device: Any) -> bool:
        """Note a GPU that the step names; whether it is one more."""
        number = device if isinstance(device, int) else torch.device(device).index
        new = number not in self.gpus
        self.gpus.add(number)
        return new

    def is_on_host(self, tensor: Any) -> bool:
        """Whether a tensor is on the host."""
        if not self.accelerator or not isinstance(tensor, Tensor):
            return False
        if not isinstance(tensor, FakeTensor):  # weights count as the GPU's, data as the host's
            return bool(self.gpus) and type(tensor) is Tensor
        number = self._number(tensor)
        if number in self.copies:
            return True
        if dist.is_initialized() and isinstance(tensor, nn.Parameter):
            return False
        return bool(self.gpus) and number in self._unplaced

    def are_weights_known(self) -> bool:
        """Whether it is known which weights the step leaves on the host: it names a GPU, and its
        weights are not divided among ranks, which places their parts anew."""
        return self.accelerator and bool(self.gpus) and not dist.is_initialized()

    def are_on_host(self, numbers: Sequence[int]) -> bool:
        """Whether one of these storages is on the host."""
        return not (self._unplaced | self.copies).isdisjoint(numbers)

    def crosses(self, given: Sequence[Any]) -> bool:
        """Whether a copy has one end on the host and the other on a GPU that the step names."""
        if not self.are_weights_known() or len(given) != 2:
            return False
        if not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in given):
            return False
        into, source = map(self.is_on_host, given)
        return into != source

    def is_computed_on_host(self, tensor: Any) -> bool:
        """Whether the recorded call has computed a tensor of the host."""
        return isinstance(tensor, FakeTensor) and self._number(tensor) in self._computed

    def is_pinned(self, tensor: Any) -> bool:
        """Whether a tensor of the host is in pinned memory."""
        if not isinstance(tensor, FakeTensor) or not self.is_on_host(tensor):
            return False
        return self._number(tensor) in self._pinned

    # -- what the step does

    def note_pinned(self, tensors: Any) -> None:
        """Note that tensors are in pinned memory."""
        for tensor in walk_tensors(tensors):
            number = self._number(tensor) if isinstance(tensor, FakeTensor) else None
            if number is not None:
                self._pinned.add(number)

    def note_result(self, name: str, given: Sequence[Any], out: Any, *, computed: bool) -> None:
        """Note where the result of an operation is; `computed` says that the recorded call runs a
        kernel for it."""
        if not self.accelerator:
            return
        stays = not self.placing and all(map(self._is_made_on_host, given))
        divided = dist.is_initialized() and any(isinstance(t, nn.Parameter) for t in given)
        mixed = not (stays or name in _MIXING or name.startswith(LISTS))
        for tensor in walk_tensors(out):
            if not isinstance(tensor, FakeTensor):
                continue
            number = self._number(tensor)
            if number is None:
                continue
            # ranks place the parts of weights anew; what an operation of the GPU has written is there
            if divided or mixed:
                self._unplaced.discard(number)
            elif stays:
                self._note_on_host(number, given)
                if computed:
                    self._computed.add(number)

    def _note_on_host(self, number: int, given: Sequence[Any]) -> None:
        """Note that a storage is on the host, as all of the tensors are that it was computed
        from."""
        fakes = [tensor for tensor in given if isinstance(tensor, FakeTensor)]
        if self.copies and any(self._number(tensor) in self.copies for tensor in fakes):
            self.copies.add(number)
        elif number not in self.copies:
            self._unplaced.add(number)

    def choose_default(self, device: Any) -> None:
        """Note the device of tensors that are made without one."""
        self.placing = names_gpu(device)
        if self.placing:
            self.name_gpu(device)

    def note_batch(self, batch: Any) -> None:
        """Note that the tensors of a batch are on the host, where a data loader makes them."""
        for tensor in walk_tensors(batch):
            number = self._number(tensor) if isinstance(tensor, FakeTensor) else None
            if number is not None:
                self._unplaced.add(number)

    def note_copy(self, tensor: Tensor, *, on_host: bool) -> None:
        """Note where a copy is that the step has made by moving a tensor."""
        number = self._number(tensor)
        if number is None:
            return
        self._unplaced.discard(number)
        if on_host:
            self.copies.add(number)

    def _is_made_on_host(self, tensor: Any) -> bool:
        """Whether a tensor was made without a device, or copied to the host."""
        if not isinstance(tensor, FakeTensor):
            return type(tensor) is Tensor
        number = self._number(tensor)
        return number in self._unplaced or number in self.copies

    def _number(self, tensor: Tensor) -> int | None:
        """Number of the storage of a tensor; None if it has none."""
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            return None
        return self._values.number(tensor)
