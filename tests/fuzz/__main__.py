"""``python -m tests.fuzz``: run the fuzzers, count the results, and print how to repeat each
failure."""

import argparse
import itertools
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import polars as pl

from tests.fuzz.harness import deal, gather, prepare, run, run_one


def main() -> int:
    """Run the fuzzers; returns 1 if an input failed."""
    entries = gather()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="over all entries")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--entry", nargs="+", choices=entries, default=[*entries], help="only these"
    )
    parser.add_argument("--new", action="store_true", help="only the new ones")
    parser.add_argument(
        "--input", type=int, help="only this input of the entry, with its traceback"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    new = [name for name, entry in entries.items() if entry.new]
    print("new fuzzers:", ", ".join(new) if new else "none")
    if given.new:
        given.entry = [name for name in given.entry if name in new]
    if not given.entry:
        print("there is no such fuzzer to run")
        return 0
    if given.input is not None:
        for name in given.entry:
            verdict, reason, error = run_one(name, entries[name], given.seed, given.input)
            print(name, verdict, reason, *traceback.format_exception(error), sep="\n")
        return 0
    # One thread in each process: more threads would wait for each other.
    os.environ |= {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    tasks = []
    # in parts, so that no process ends much later
    for name, count in deal(given.inputs, given.entry).items():
        step = max(1, -(-count // 8))
        tasks += [(name, min(step, count - i), given.seed, i) for i in range(0, count, step)]
    with ProcessPoolExecutor(
        given.processes, mp_context=get_context("spawn"), initializer=prepare
    ) as pool:
        parts = pool.map(run, *zip(*tasks, strict=True))
        rows = pl.DataFrame(list(itertools.chain.from_iterable(parts)))
    counts = rows.pivot("verdict", index="entry", values="seconds", aggregate_function="len")
    costs = rows.group_by("entry").agg(
        pl.sum("seconds"), pl.max("seconds").alias("slowest"), pl.max("bytes")
    )
    with pl.Config(
        tbl_rows=-1,
        tbl_hide_dataframe_shape=True,
        tbl_hide_column_data_types=True,
        float_precision=2,
    ):
        print(counts.join(costs, on="entry", maintain_order="left"))
    failures = rows.filter(verdict="failure")["reason"]
    print(*failures, sep="\n")
    return 1 if len(failures) else 0


if __name__ == "__main__":
    sys.exit(main())
