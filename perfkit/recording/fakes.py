"""Fake tensors that autograd treats as it treats real ones.

Autograd notes how a view was made if its base is of a class of Python's, and otherwise where it lies.
It matters once a view is changed in place: its gradient goes back through that function, or through
`as_strided`, which takes memory and a copy. A tensor tells its class by a dispatch key, which fake
tensors of a capture lack, so that their gradients take the way of real ones.

Without that key PyTorch does not hand operations to the class. The modes of a capture see all of
them. Where these are left, others stand in: `HandOver` while PyTorch's rules or the program work past
the modes, and `Left` for tensors that a step leaves behind, after the capture. Without them a kernel
would read memory that is not there.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from perfkit.workloads.vocabulary import walk_tensors

_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE


class _Keyless(FakeTensor):
    """The class of a fake tensor while it is made: PyTorch gives no key to one that takes no
    operations."""

    __torch_dispatch__: Any = torch._C._disabled_torch_dispatch_impl


class HandOver(TorchDispatchMode):
    """Hands operations on fake tensors to their class, as their key would."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; to disable the compiler at each call would take long."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in walk_tensors([args, kwargs]))
        is_handled = torch._C._get_dispatch_mode(_FAKE) is not None
        if is_fake and not is_handled:
            return FakeTensor.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)


class Fakes(FakeTensorMode):
    """PyTorch's rules for fake tensors, which may call operations on such tensors.

    Settings are those of a capture: real tensors count as fake ones, and no rule computes.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        # an array of a fake tensor would be read from memory that is not there; with this it is an error
        self._allow_unsafe_data_ptr_access = False
        self._hand_over = HandOver()

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """The result of an operation by its rule."""
        # entering the mode takes longer than many a rule
        _push_mode(self._hand_over)
        try:
            return super().dispatch(*args, **kwargs)
        finally:
            _pop_mode()


def make_keyless(make: Any, *args: Any, **kwargs: Any) -> Any:
    """A fake tensor without its dispatch key.

    Parameters
    ----------
    make : callable
        Makes a tensor of the class that is its first argument.
    *args : object
        Its other arguments.
    **kwargs : object
        Those that have a name.

    Returns
    -------
    made : FakeTensor
        The tensor.
    """
    made = make(_Keyless, *args, **kwargs)
    made.__class__ = FakeTensor
    return made


class Left(FakeTensor):
    """A fake tensor that a step has left behind: PyTorch's rules work out what it is used for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What a function returns: by the rules of a capture that runs now, else by those of the one
        that has left the tensor behind."""
        kwargs = kwargs or {}
        left = next(t for t in walk_tensors([args, kwargs]) if isinstance(t, Left))
        is_captured = torch._C._get_dispatch_mode(_FAKE) is not None
        with (
            torch._C.DisableTorchFunctionSubclass(),
            nullcontext() if is_captured else left.fake_mode,
        ):
            return func(*args, **kwargs)
