"""Where a warning belongs: the line outside of perfkit that called it."""

import sys
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


def find_stacklevel() -> int:
    """The ``stacklevel`` of a warning that the calling function raises, so that it names the line that
    called perfkit, however many functions of perfkit are between [-]."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
        level += 1
        frame = frame.f_back
    return level
