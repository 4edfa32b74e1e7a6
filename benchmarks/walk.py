"""Number of functions and files of perfkit that one prediction of a DLRM on 8 ranks calls.

python -m benchmarks.walk [--list]
"""

import sys
from types import FrameType
from typing import Any

from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.prediction.predictor import predict
from perfkit.workloads.dlrm import DLRM


def walk() -> set[tuple[str, str]]:
    """Files and functions that are called; without lambdas, comprehensions and classes that are
    only created."""
    platform, model, seen = (
        load_platform("h100-sxm-8x4"),
        DLRM("dlrm-default", batch=2049 * 8),
        set[tuple[str, str]](),
    )

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and "/perfkit/" in code.co_filename and not code.co_name.startswith("<"):
            seen.add((code.co_filename.rpartition("/perfkit/")[2], code.co_qualname))

    with keep_quiet():
        sys.setprofile(note)
        predict(model, platform, ranks=8)
        sys.setprofile(None)
    return seen


if __name__ == "__main__":
    found = walk()
    if "--list" in sys.argv:
        print(*(f"{file}: {name}" for file, name in sorted(found)), sep="\n")
    print(f"{len(found)} functions in {len({file for file, _ in found})} files (at most 100 in 16)")
