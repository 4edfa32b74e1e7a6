"""The command line, see the package's docstring."""

import argparse
import sys
import time

from tests.golden.answers import PARTS, answer, has_all_sources
from tests.golden.compare import compare, read, report, write


def main() -> int:
    """Make or check answers; 1 where a number differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description="What perfkit answers today."
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all, unless named")
    parser.add_argument("--make", action="store_true", help="write the answers")
    parser.add_argument(
        "--check", action="store_true", help="compare with what was written; the default"
    )
    parser.add_argument(
        "--words", action="store_true", help="show texts that differ, too; they fail nothing"
    )
    given = parser.parse_args()
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    failed = False
    parts = given.parts or [*PARTS]
    for number, part in enumerate(parts, 1):
        print(f"{part}, part {number} of {len(parts)}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        new = answer(part, show_progress if sys.stderr.isatty() else None)
        if given.make:
            make(part, new)
            said = f"{part}: {len(new)} answers written"
        else:
            found = compare(part, new, complete=has_all_sources())
            moved = [each for each in found if not each.is_of_words]
            shown = found if given.words else moved
            failed |= bool(moved)
            said = report(part, shown) if shown else f"{part}: {len(new)} answers equal"
        print(f"{said}, {time.perf_counter() - start:.1f} s", flush=True)
    return int(failed)


def show_progress(text: str) -> None:
    """Write over the last line of a terminal."""
    print(f"\r\x1b[K  {text[:76]}", end="\r", file=sys.stderr, flush=True)


def make(part: str, new: dict[str, object]) -> None:
    """Write the answers of a part; those whose sources are not here stay as they are."""
    if has_all_sources():
        write(part, new)
    else:
        write(part, read(part) | new)


if __name__ == "__main__":
    sys.exit(main())
