"""Peak memory of real steps on this machine, from the allocations of the profiler, beside the
predicted one."""

import gc
from collections.abc import Callable
from functools import partial
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
    pk.DLRM(rows=[200_000] * 8, dim=64, pooling=20, batch=2048),
    pk.DLRM("dlrm-ddp", batch=4096),
    pk.DLRM("dlrm-ddp", batch=2048, sparse=False),
    Net("resnet", batch=8, size=128, width=64, depth=2),
    Net("resnet", batch=2, size=224, width=64, depth=3),
)


def measure_peak(make_step: Callable[[], Callable[[], Any]]) -> float:
    """Most bytes of tensors during a step [B]: those that exist when it begins, and what it
    allocates."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    def find() -> dict[int, Any]:
        """Tensors by storage."""
        found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        return {
            each.untyped_storage()._cdata: each for each in found if each.layout is torch.strided
        }

    before, step = find(), make_step()
    step()
    for tensor in find().values():
        tensor.grad = None  # the profiler does not see the release of older tensors
    gc.collect()
    held = sum(each.untyped_storage().nbytes() for key, each in find().items() if key not in before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
        step()
    events = sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return float(
        held + max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    )


@command({})
def main(given: Any) -> None:
    """Most memory of real steps, measured and predicted."""
    from perfkit.recording.modules import build_step

    rows = []
    for workload in _STEPS:
        with keep_quiet():
            found = pk.predict(workload, "zen3-2").memory()
        measured = measure_peak(partial(lambda one: build_step(one)[0], workload))
        sizes = {"measured": measured / 1e6, "predicted": found.total / 1e6}
        rows.append({"step": workload.description, **sizes, "error": found.total / measured - 1})
    columns = {
        "measured [MB]": "{measured:.1f}",
        "predicted [MB]": "{predicted:.1f}",
        "error": "{error:+.1%}",
    }
    print(lay_out(rows, {"step": "{step}"} | columns))
