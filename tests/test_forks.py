"""In a process made by fork everything works, or says in one line what to do; nothing waits for
ever."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import perfkit as pk
from perfkit.ground import forks
from perfkit.ground.files import reading
from perfkit.readers.kernel_database import read_gemms

ROOT = Path(__file__).resolve().parent.parent

#: Prints what became of each call in a forked process of its own: "done", the error, or "waits".
PROGRAM = """
import json, os, sys, time, warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import perfkit as pk
import polars as pl
from perfkit import plots
from perfkit.platform.sources import fit_curves
from tests.test_report import MODEL, some_comparison

warnings.simplefilter("ignore")
BERT, NAME = pk.Transformer.bert, "h100-sxm-8"
GRID = {"batch": [8, 16]}
platform = pk.load_platform(NAME)
pl.DataFrame({"a": [1, 2]}).filter(pl.col("a") > 1)  # starts the threads of Polars
result = pk.predict(MODEL, platform, ranks=2)
comparison = pk.compare("a100-sxm-8", NAME, MODEL, ranks=1)
sharding = pk.shard(MODEL, NAME, ranks=2, steps=10)
exploration = pk.explore(BERT(batch=16), NAME, ranks=8)
SIZES = [1024 * 4**i for i in range(8)]
TIMES = pl.DataFrame({"nbytes": SIZES, "seconds": [1e-5 + n / 1e11 for n in SIZES]}).with_columns(
    operation=pl.lit("all_reduce"), ranks=pl.lit(8), dtype=pl.lit("fp16"), in_place=pl.lit(False)
)
GPT = pk.Transformer.gpt2("gpt2-xl")
RUNS = [{"batch": 32, "ranks": 8, "seconds": 0.8 + 0.05 * i} for i in range(6)]
RIGHT = {
    "predict": lambda: pk.predict(MODEL, platform, ranks=2).explain(),
    "memory": lambda: repr(result.memory()),
    "breakdown": lambda: result.breakdown(),
    "critical_path": lambda: result.critical_path(),
    "shard": lambda: pk.shard(MODEL, NAME, ranks=2, steps=10).explain(),
    "tables": lambda: pk.TableSet((pk.EmbeddingTable(1000, 64),), batch=64).table(),
    "explore": lambda: pk.explore(BERT(batch=16), NAME, ranks=8).table(),
}
ANY = {
    "modules": lambda: result.modules(),
    "chart": lambda: result.chart().to_dict(),
    "trace": lambda: result.save_trace("t.json"),
    "sections": lambda: [*result.sections()],
    "sweep": lambda: pk.sweep(BERT, GRID, NAME, progress=False).table(),
    "scaling": lambda: pk.scaling(MODEL, NAME, [1, 2]).table(),
    "compare": lambda: pk.compare("a100-sxm-8", NAME, MODEL, ranks=1).explain(),
    "comparison": lambda: (comparison.explain(), comparison.chart().to_dict(), comparison.table()),
    "by_rank": lambda: sharding.by_rank(),
    "plan chart": lambda: sharding.chart().to_dict(),
    "front": lambda: exploration.front(),
    "exploration": lambda: exploration.explain(),
    "exploration chart": lambda: exploration.chart().to_dict(),
    "report": lambda: pk.report(result, path="r.html"),
    "platform report": lambda: pk.report(platform, path="p.html"),
    "check": lambda: (some_comparison().as_text(), some_comparison().chart().to_dict()),
    "platforms": lambda: pk.platforms(),
    "sensitivity": lambda: result.sensitivity().chart().to_dict(),
    "curves": lambda: fit_curves(TIMES),
    "runs": lambda: pk.tune(GPT, "a100-sxm-8", RUNS).table(),
}
CALLS = {**RIGHT, **ANY}


def fork(name, call):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            said = "done"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    return child, reader


children = {name: fork(name, call) for name, call in CALLS.items()}
verdicts, end = {}, time.monotonic() + 120
while children and time.monotonic() < end:
    for name, (child, reader) in [*children.items()]:
        if os.waitpid(child, os.WNOHANG)[0]:
            verdicts[name] = os.read(reader, 4000).decode()
            del children[name]
    time.sleep(0.02)
for name, (child, _) in children.items():
    os.kill(child, 9)
    verdicts[name] = "waits"
with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
    swept = pk.sweep(BERT, GRID, NAME, progress=False, executor=pool)
verdicts["executor"] = "done" if len(swept.table()) == 2 else "lost rows"
print(json.dumps(verdicts))
"""


def run_forks(folder: Path) -> dict[str, str]:
    # with one thread Polars answers some queries in the process itself, and nothing waits
    threads = {"POLARS_MAX_THREADS": "4"}
    settings = {
        **os.environ,
        **threads,
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    verdicts: Any = json.loads(done.stdout)
    return verdicts


def test_after_queries_a_forked_process_works_or_says_a_line(tmp_path: Path) -> None:
    verdicts = run_forks(tmp_path)
    for name in ("predict", "memory", "breakdown", "critical_path", "shard", "tables", "explore"):
        assert verdicts[name] == "done", name
    assert verdicts["executor"] == "done", "a pool of forked processes works"
    refused = "ForkError: this process was made by fork, and Polars, .*get_context.'spawn'."
    for name, said in verdicts.items():
        assert said == "done" or re.fullmatch(refused, said), (name, said)
    for name in ("sweep", "chart", "report"):
        assert verdicts[name] != "done", "the case that waited"


def test_readers_let_a_fork_error_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 0, "dur": 9}
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [event]}))
    tables = tmp_path / "tables.parquet"
    pl.DataFrame({"rows": [1000], "dim": [64]}).write_parquet(tables)
    folder = tmp_path / "data" / "h" / "family" / "sglang" / "0.5.14"
    folder.mkdir(parents=True)
    row = {"gemm_dtype": ["bfloat16"], "m": [64], "n": [64], "k": [64], "latency": [0.1]}
    pl.DataFrame(row).write_parquet(folder / "gemm_perf.parquet")
    monkeypatch.setenv("PERFKIT_KERNEL_DATABASE", str(tmp_path))
    reads: dict[str, Callable[[], Any]] = {
        "trace": partial(pk.read_trace, trace),
        "tables": partial(pk.read_tables, tables),
        "products": partial(read_gemms, "h"),
    }
    for read in reads.values():
        read()
    monkeypatch.setattr(forks._Threads, "lost", True)
    for name, read in reads.items():
        with pytest.raises(forks.ForkError, match=r"^this process was made by fork, and Polars"):
            read()
            pytest.fail(name)


def test_a_reader_without_memory_does_not_blame_the_file(tmp_path: Path) -> None:
    said = r"^big\.csv cannot be read: this process has too little memory"
    with pytest.raises(ValueError, match=said), reading("big.csv", "name another"):
        raise MemoryError
