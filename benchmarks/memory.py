"""Peak memory of real steps on this machine, from the allocations of the profiler, beside the
predicted one."""

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.tables import lay_out
from perfkit.platform.estimates import keep_quiet
from perfkit.recording.nets import Net

_BERT, _GPT = pk.Transformer.bert, pk.Transformer.gpt2
#: Steps of language models, of recommendation with each kind of gradient, and of convolutional
#: nets.
_STEPS: tuple[Any, ...] = (
    _BERT("bert-base", layers=4, batch=4, sequence=128),
    _BERT("bert-base", layers=2, batch=2, sequence=512),
    _GPT("gpt2", layers=3, batch=1, sequence=256),
    _GPT("gpt2", layers=2, batch=2, sequence=256, attention="eager"),
    _GPT("gpt2", layers=2, batch=1, sequence=128, optimizer="sgd"),
    pk.DLRM(rows=[200_000 for _ in range(8)], dim=64, pooling=20, batch=2048),
    pk.DLRM("dlrm-ddp", batch=4096),
    pk.DLRM("dlrm-ddp", batch=2048, sparse=False),
    Net("resnet", batch=8, size=128, width=64, depth=2),
    Net("resnet", batch=2, size=224, width=64, depth=3),
)


def _find_tensors() -> dict[int, Any]:
    """Tensors of this process by their storage."""
    import torch

    tensors = dict[int, Any]()
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:
            tensors[thing.untyped_storage()._cdata] = thing
    return tensors


def measure_peak(make_step: Callable[[], Callable[[], Any]]) -> float:
    """Most bytes of tensors during a step [B]: those that exist when it begins, and what it
    allocates."""
    from torch.profiler import ProfilerActivity, profile

    before = _find_tensors()
    step = make_step()
    step()
    for tensor in _find_tensors().values():
        tensor.grad = None  # the profiler does not see the release of older tensors
    gc.collect()
    held = 0
    for storage, tensor in _find_tensors().items():
        if storage not in before:
            held += tensor.untyped_storage().nbytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocations = [event.nbytes() for event in events if event.name() == "[memory]"]
    return float(held + max(accumulate(allocations)))


def compare(workload: Any) -> dict[str, Any]:
    """Measured and predicted peak of one step [MB]."""
    from perfkit.recording.modules import build_step

    with keep_quiet():
        predicted = pk.predict(workload, "zen3-2").memory().total
    measured = measure_peak(lambda: build_step(workload)[0])
    return {
        "step": workload.description,
        "measured": measured / 1e6,
        "predicted": predicted / 1e6,
        "error": predicted / measured - 1,
    }


_COLUMNS = {
    "step": "{step}",
    "measured [MB]": "{measured:.1f}",
    "predicted [MB]": "{predicted:.1f}",
    "error": "{error:+.1%}",
}


@command({})
def main(given: Any) -> None:
    """Most memory of real steps, measured and predicted."""
    print(lay_out([compare(workload) for workload in _STEPS], _COLUMNS))
