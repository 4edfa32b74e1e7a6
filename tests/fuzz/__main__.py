"""``python -m tests.fuzz``: run the fuzzers, print what became of the inputs, and how to see each failure again."""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.fuzz.harness import Outcome, deal, gather, hush, merge, run_named, run_one


def show(outcomes: list[Outcome]) -> str:
    """A line for each entry, one for all, and the failures."""
    lines = [
        f"{'entry':<28}{'inputs':>8}{'taken':>8}{'refused':>9}{'failures':>10}{'slowest':>10}{'memory':>10}{'CPU':>8}"
    ]
    whole = Outcome("all")
    for o in outcomes:
        merge(whole, o)
    for o in (*outcomes, whole):
        lines.append(
            f"{o.entry:<28}{o.inputs:>8}{o.taken:>8}{o.refused:>9}{len(o.failures):>10}{o.slowest:>8.2f} s"
            f"{o.memory / 1e6:>7.0f} MB{o.seconds:>6.0f} s"
        )
    return "\n".join([*lines, *(f"\n{failure.entry}: {failure}" for failure in whole.failures)])


def main() -> int:
    """Run what was asked for; 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="over all entries")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--entry", action="append", help="only this entry; may be given several times")
    parser.add_argument("--input", type=int, help="only this input of the entry, with its traceback")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    entries = gather()
    if unknown := sorted({*(arguments.entry or ())} - {*entries}):
        parser.error(f"no entry {', '.join(unknown)}; there are {', '.join(entries)}")
    entries = {name: entry for name, entry in entries.items() if not arguments.entry or name in arguments.entry}
    if arguments.input is not None:
        for name, entry in entries.items():
            print(*(text for text in (name, *run_one(name, entry, arguments.seed, arguments.input)) if text), sep="\n")
        return 0
    counts, tasks = deal(entries, arguments.inputs), []
    for name, count in counts.items():  # in parts, so that no process is left with a long entry at the end
        step = max(1, -(-count // 8))
        tasks += [(name, min(step, count - start), arguments.seed, start) for start in range(0, count, step)]
    found = {name: Outcome(name) for name in counts}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn"), initializer=hush) as pool:
        for o in pool.map(run_named, *zip(*tasks, strict=True)):
            merge(found[o.entry], o)
    print(show(list(found.values())))
    return 1 if any(outcome.failures for outcome in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
