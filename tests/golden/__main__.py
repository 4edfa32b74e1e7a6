"""The command line, see the package's docstring."""

import argparse
import math
import sys
import time

from .answers import FAST, PARTS, answer
from .compare import differences, read, report, write


def main() -> int:
    """Make or check answers; 1 where something differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description="What perfkit answers today."
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--make", action="store_true", help="write the answers")
    parser.add_argument(
        "--check", action="store_true", help="compare with what was written; the default"
    )
    parser.add_argument("--all", action="store_true", help="also the slow parts")
    parser.add_argument("--numbers", action="store_true", help="compare numbers only")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    failed = False
    for part in given.parts or (
        PARTS if given.all or given.make else [part.__name__ for part in FAST]
    ):
        start = time.perf_counter()
        new, found = answer(part), []
        if given.make:
            write(part, new)
        else:
            found = [
                each
                for each in differences(read(part), new)
                if not given.numbers or each.change < math.inf
            ]
        failed |= bool(found)
        done = f"{part}: {len(new)} answers {'written' if given.make else 'equal'}, {time.perf_counter() - start:.1f} s"
        print(report(part, found) if found else done, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
