"""Whether this machine can measure what a platform has."""

import perfkit as pk
from perfkit.ground.units import show


def check_measurable(name: str) -> None:
    """Refuse to measure iterations of a platform with GPUs on a machine without them."""
    platform = pk.load_platform(name)
    if platform.device.kind == "cpu":
        return
    from perfkit.measure.processes import check_torch

    check_torch()
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            f"platform is {show(name)}, which has GPUs; this command measures, and this machine has "
            "no GPU that PyTorch can use; run it where the GPUs are, or name the platform file of "
            "this machine"
        )
