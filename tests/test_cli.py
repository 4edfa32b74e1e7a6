"""The command line: every bad line gives one clear sentence and exit code 2; predictions need no
torch."""

import io
import json
import re
import shlex
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

import perfkit
from perfkit.__main__ import main
from perfkit.calibration.checks import Comparison
from perfkit.commands.command import Command
from perfkit.commands.group import COMMANDS, perfkit_group
from perfkit.measure.processes import MeasurementError
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.platform import Platform
from perfkit.workloads.transformer_presets import TRANSFORMERS

ROOT = Path(__file__).resolve().parent.parent
GPU = ["predict", "--platform", "h100-sxm-8", "--model"]
BERT = [*GPU, "bert-base"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands write to a folder of the test, measure nothing, and leave the display of warnings as
    it was."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    measure = "perfkit.calibration.cpu_measure.run_processes"
    monkeypatch.setattr(measure, lambda *_, **__: pytest.fail("something was measured"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def run(line: str | list[str]) -> int:
    return main(line.split() if isinstance(line, str) else line)


def fail(error: BaseException, printed: str = "") -> Any:
    def call(*_: Any, **__: Any) -> None:
        if printed:
            print(printed, file=sys.stderr)
        raise error

    return call


PREDICT, CALIBRATE = "predict --platform h100-sxm-8 --model ", "calibrate --out P.toml "
#: What is typed, and what is said of it.
BAD = {
    PREDICT + "bert-bse": "model is 'bert-bse'; did you mean 'bert-base'. known are ",
    "predict --model gpt2 --platform h100": "h100.*not a file|h100.*known",
    PREDICT + "bert-base --batch 0": "batch is 0; it must be a whole number above 0",
    PREDICT + "bert-base --batch nan": "argument --batch: .*'nan'",
    PREDICT + "dlrm-mlperf --sequence 8": "sequence is given; a DLRM has none; leave it out",
    PREDICT + "bert-base --batch 16 --ranks 16": "ranks is 16; platform 'h100-sxm-8' has 8; take "
    "at most 8, or 2 nodes: --platform h100-sxm-8x2",
    "predict --model bert-base --batch 512 --ranks 512 --platform h100-sxm-8x8": "--platform h100-sxm-8x64",
    "predict --model bert-base --batch 4 --ranks 4 --platform zen5-2": "has 2; take at most 2$",
    PREDICT + "bert-base --ranks all": "argument --ranks",
    "predict --platform h100-sxm-8": "required: --model",
    "": "required: command",
    PREDICT + "bert-base --speed high": "unrecognized arguments: --speed;",
    "calibrate --out no/such/P.toml": "out is .*folder does not exist; create it",
    "calibrate --out .": "out is '.'; it is a folder",
    "calibrate --out mine": "known by their ending; name it mine.toml",
    CALIBRATE + "--partial": "partial is given; it is for logs",
    CALIBRATE + "--ranks-per-node 4": "ranks_per_node is given; it is for logs",
    CALIBRATE + "--partial --from-kernel-database h100_sxm": "partial is given; it",
    CALIBRATE + "--traces no.json --measurements no.json": "measurements is given; another source",
    CALIBRATE
    + "--from-nccl-logs . --traces no.json --base zen5-2": "traces is given; another source",
    CALIBRATE + "--from-nccl-logs . --measurements m.json": "measurements is given; another source",
    CALIBRATE
    + "--measurements no.json --quick": "quick is given; it is for measuring this machine",
    CALIBRATE + "--base h100-sxm-8": "base is given; name the data to fit: --from-nccl",
    CALIBRATE + "--device cuda --quick": "quick is given; it says what to measure on a CPU",
    CALIBRATE
    + "--device cuda --stop-early": "stop_early is given; it says what to measure on a CPU",
    CALIBRATE + "--device cuda --models all": "models is given; it says what to measure on a CPU",
    CALIBRATE + "--from-nccl-logs=": "from_nccl_logs is ''; it is empty; name a file",
    CALIBRATE + "--from-kernel-database=": "from_kernel_database is ''; it is empty; name a",
    CALIBRATE + "--from-nccl-logs .": "base is missing; name the platform whose collectives",
    CALIBRATE + "--from-kernel-database h101_sxm": "gallery has no node of 'h101_sxm'; name the",
    CALIBRATE + "--from-nccl-logs . --quick": "quick is given; it is for measuring this machine",
    "check --platform h100-sxm-8 --json no/such.json": "json is .*folder does not exist",
    "demo --report no/such/report.html": "report is .*folder does not exist",
    "predict --model=-- --platform zen5-2": "model is '--'; known are dlrm-default",
    "predict --model=-- --platform=-- --ranks=--": "argument --ranks: '--' is no whole number",
    "predict": "required: --model, --platform; see perfkit predict --help",
    "trace --report a.html": "required: FILE",
    "predict --model --platform h100-sxm-8": "argument --model: its value is missing",
    PREDICT + "bert-base --batch": "Option '--batch' requires an argument; see perfkit predict",
    PREDICT + "bert-base --mixed=yes": "Option '--mixed' does not take a value",
    PREDICT + "bert-base --execution lazy": "argument --execution: 'lazy' is not one of 'eager',",
    PREDICT + "bert-base --rank 2": r"arguments: --rank; did you mean --ranks\?",
    "predic --model bert-base": "command is 'predic'; known are doctor, .*did you mean 'predict'",
    "--loud": "unrecognized arguments: --loud; perfkit takes --version",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_ends_with_one_sentence_and_code_2(
    line: str, capsys: Capture, tmp_path: Path
) -> None:
    assert run(line) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("perfkit"), said
    assert re.search(BAD[line], said), said
    left_behind = {path.name for path in tmp_path.iterdir()} - {"cache"}
    assert not left_behind


@pytest.mark.filterwarnings("always")
def test_a_platform_calibrated_for_other_operations(toy: Platform, capsys: Capture) -> None:
    """Without collectives, several ranks cannot be predicted; one rank can, and lists unknown
    operations."""
    gemms = {name: fit for name, fit in toy.kernels.items() if name.startswith("gemm.")}
    replace(toy, collectives={}, kernels=gemms).save("other.toml")
    line = "predict --model bert-base --batch 2 --platform other.toml --ranks 1"
    assert run(f"{line} --ranks 2") == 2
    assert "no model for the collective 'all_reduce'" in capsys.readouterr().err
    assert run(f"{line} --dtype bf16") == 2
    assert "known are fp32" in capsys.readouterr().err
    assert run(line) == 0
    out, err = capsys.readouterr()
    assert "not modelled, timed as memory traffic" in out
    assert "  warning: " in out
    assert not err, "what to know is said once"


def list_presets_of_each_type() -> list[str]:
    """Last preset of each type of model; the others have the same layers in other sizes, which
    tests/test_presets.py builds."""
    last_of_type = dict[str, str]()
    for name, preset in TRANSFORMERS.items():
        last_of_type[preset.model_type] = name
    return [*last_of_type.values()]


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("model", [*list_presets_of_each_type(), "dlrm-default", "dlrm-mlperf"])
def test_predict_explains_presets_of_each_type(model: str, capsys: Capture) -> None:
    assert run([*GPU, model, "--ranks", "2"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in (model, "2 of 8 ranks of h100-sxm-8", "at least"))


def test_predict_takes_its_options(capsys: Capture) -> None:
    assert (
        run([*BERT, "--batch", "16", "--sequence", "256", "--dtype", "bf16", "--ranks", "8"]) == 0
    )
    assert "bert-base, batch 16, sequence 256 on 8 of 8 ranks" in capsys.readouterr().out
    more = "llama-3-8b --batch 16 --dtype bf16 --mixed --parallel fsdp --accumulate 2 --checkpoint --ranks 8"
    assert run([*GPU, *more.split()]) == 0
    assert (
        "llama-3-8b, batch 16, sequence 8192, checkpoint, accumulate 2, fsdp on 8"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MeasurementError("measuring process 1 was killed"), 2, "measuring process 1 was killed"),
        (KeyboardInterrupt(), 130, "interrupted; finished measurements are kept"),
        (KeyboardInterrupt(15), 143, ""),
        (OSError(28, "No space left on device", "P.toml"), 2, "No space left on device"),
        (
            ModuleNotFoundError("torch is not installed; run pip install torch", name="torch"),
            2,
            "run pip install torch$",
        ),
        (ValueError("poor fit"), 2, "poor fit"),
        (KeyError("a bug"), None, "a bug"),
    ],
    ids=repr,
)
def test_an_error_is_one_line_and_while_measuring_leaves_a_log(
    error, code, words, tmp_path, monkeypatch, capsys
):
    log = tmp_path / "perfkit-run.log"
    monkeypatch.setattr(sys, "argv", ["perfkit", "calibrate", "\udcff"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    error.add_note("note of the process")
    for printed in ("", "kernels: 10%\rkernels: 20%"):
        assert not log.exists()
        monkeypatch.setattr(perfkit, "calibrate", fail(error, printed))
        if code is None:
            with pytest.raises(KeyError):
                run("calibrate --out P.toml")
        else:
            assert run("calibrate --out P.toml") == code
        lines = capsys.readouterr().err.strip("\n").split("\n")[bool(printed) :]
        assert (
            lines[0].startswith("perfkit: ")
            and re.search(words, lines[0])
            and len(lines) == 1 + bool(printed)
        )
    assert f"{log.name} has machine, versions" in lines[1]
    text = log.read_text()
    for part in (
        "command: perfkit calibrate",
        "processor: ",
        "numpy: ",
        "OMP_NUM_THREADS: 3",
        "note of the process",
        "kernels: 20%\n",
        "Traceback (most recent",
        "in call",
        "\\udcff",
    ):
        assert part in text, part
    assert "10%" not in text, "only the last state of a progress bar"


def start(code: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in which ``perfkit`` is the command."""
    code = f"import sys; sys.argv = ['perfkit', 'models']\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


INTERRUPT = """
import signal, sys
class Interrupt:
    def find_spec(self, name, *rest):
        if name == WHERE:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from perfkit.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("where", ["ast", "click", "numpy", "perfkit.workloads.dlrm"])
def test_an_interrupt_of_an_import_ends_without_a_traceback(where: str) -> None:
    done = start(f"sys.modules.pop('ast', None)\n{INTERRUPT.replace('WHERE', repr(where))}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_that_a_package_hides_is_one(capsys: Capture) -> None:
    from perfkit.commands.running import run_command

    def hide() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ImportError("numpy is broken") from error
        return 0

    # a job in the background, such as that of a script, begins with interrupts that are ignored
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run_command(hide) == 130
        assert capsys.readouterr().err == "perfkit: interrupted\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outside)


def test_a_program_that_imports_perfkit_keeps_its_interrupts() -> None:
    code = (
        "import signal, sys\n"
        # a process of the background inherits that interrupts are ignored
        "signal.signal(2, signal.default_int_handler)\n"
        "import perfkit\n"
        "sys.exit(signal.getsignal(2) is signal.default_int_handler)"
    )
    assert start(code.replace("sys.exit", "print")).stdout != "True\n", "the command has its own"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("closed", "model", "code", "said"),
    [(">&-", "bert-base", 2, "standard output is closed"), ("2>&-", "bert", 2, "")],
)
def test_closed_streams_give_a_line_or_nothing(
    closed: str, model: str, code: int, said: str
) -> None:
    line = f"{sys.executable} -m perfkit predict --model {model} --platform h100-sxm-8 {closed}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == code and said in done.stderr and len(done.stderr) < 200
    assert not done.stdout


def test_what_a_terminal_cannot_show_takes_nothing_else_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True)
    )
    assert run(["predict", "--model", "dlrm-default", "--platform", "zen3-2"]) == 0
    assert b"dlrm" in shown.getvalue() and b" tables ? " in shown.getvalue()


@pytest.mark.filterwarnings("always")
def test_messages_are_one_short_line_that_no_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def check(*_: Any, **__: Any) -> None:
        warnings.warn("one\ntwo\x1b[31m", stacklevel=1)
        raise RuntimeError("one\ntwo\x1b[31m" + "x" * 5000)

    monkeypatch.setattr(perfkit, "check", check)
    assert run([*BERT, "--spe\ned\x1b[31m", "x" * 5000]) == 2
    assert run(["check", "--platform", "one\ntwo\x1b[31m"]) == 2
    lines = capsys.readouterr().err.splitlines()
    for line in lines:
        assert len(line) < 1200
        assert line.isprintable()
        assert line.split(":")[0] == "perfkit"
    assert "\\x1b[31m" in lines[0]


def test_check_writes_its_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pair = {
        "family": "dlrm",
        "name": "dlrm-0",
        "config": {},
        "ranks": 1,
        "predicted_s": 1.1,
        "low_s": 0.9,
        "high_s": 1.3,
        "measured_s": 1.0,
        "measured_q1_s": 0.9,
        "measured_q3_s": 1.2,
        "flagged": True,
        "bottleneck": "GEMM-bound",
        "noise": 0.02,
    }
    comparison = Comparison((pair,), "toy", {"processor": "x"}, {"python": "3"})
    asked = []

    def check(platform: str, **options: Any) -> Comparison:
        asked.append((platform, options))
        return comparison

    monkeypatch.setattr(perfkit, "check", check)
    assert run("check --platform toy --seed 5 --json pairs.json") == 0
    text = capsys.readouterr().out
    for part in ("+10.0%", "unsteady", "noise floor"):
        assert part in text
    data = json.loads((tmp_path / "pairs.json").read_text())
    keys = ["format", "platform", "machine", "versions", "noise_floor", "runs"]
    assert list(data) == keys
    assert data["runs"] == [pair]
    assert run("check --platform toy --models all --json -") == 0
    assert json.loads(capsys.readouterr().out) == data
    assert asked == [("toy", {"seed": 5}), ("toy", {"models": "all"})]


def test_a_reader_that_stops_reading_ends_a_command_quietly() -> None:
    words = [sys.executable, "-m", "perfkit", "tables"]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True, cwd=ROOT) as command:
        command.stdout.close()
        assert command.stderr.read() == "" and command.wait() == 141


def test_calibrate_without_torch_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest);"
        "from perfkit.__main__ import main; sys.exit(main(['calibrate', '--quick', '--out', sys.argv[1]]))"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "P.toml")]
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 2 and "torch is not installed; run pip install torch" in done.stderr
    assert not (tmp_path / "P.toml").exists()


@pytest.mark.filterwarnings("always")
def test_shard_takes_the_optimizer_of_tables(capsys: Capture, tmp_path: Path) -> None:
    line = "--platform h100-sxm-8 --steps 1 --optimizer"
    assert run(f"shard --tables mlperf-dlrm-v1 --batch 4096 {line} adagrad") == 0
    assert "rows are updated by adagrad (optimizer)" in capsys.readouterr().out
    assert run(f"shard --model dlrm-default {line} adagrad") == 2
    assert "a model has its own; it is for --tables" in capsys.readouterr().err


def test_shard_takes_all_ranks_of_the_platform_and_says_so(capsys: Capture, tmp_path: Path) -> None:
    line = "shard --model dlrm-default --platform h100-sxm-8 --steps 5 --json - "
    assert run(line) == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 8
    line = line.replace("--json - ", "")
    assert run(f"{line}--out plan.json") == 0
    assert "ranks: 8, all of h100-sxm-8; --ranks takes another number" in capsys.readouterr().out
    assert run(f"{line}--ranks 4 --out plan.json") == 0
    assert "another number" not in capsys.readouterr().out
    assert run(f"{line}--plan plan.json") == 0
    assert "ranks: 4, as in --plan" in capsys.readouterr().out


def test_a_plan_with_ranks_beyond_the_platform_asks_for_ranks(
    capsys: Capture, tmp_path: Path
) -> None:
    Path("tables.csv").write_text("name,rows,dim\na,1000,64\n")
    entry = {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [9]}
    Path("beyond.json").write_text(json.dumps({"ebc": {"a": entry}}))
    line = "shard --tables tables.csv --platform h100-sxm-8 --batch 64 --plan beyond.json"
    assert run(line) == 2
    text = "no table is on every rank; pass --ranks, the number of ranks\n"
    assert capsys.readouterr().err.endswith(text)


@pytest.mark.filterwarnings("always")
def test_shard_writes_a_plan_for_torchrec_and_judges_it(capsys: Capture, tmp_path: Path) -> None:
    line = "shard --tables mlperf-dlrm-v1 --platform h100-sxm-8 --steps 5"
    form = "--format torchrec --out torchrec.json"
    assert run(f"{line} {form} --module sparse.ebc --json -") == 0
    figures = json.loads(capsys.readouterr().out)
    modules = json.loads(Path("torchrec.json").read_text())
    tables = perfkit.read_tables("mlperf-dlrm-v1").tables
    plan = perfkit.Plan.from_torchrec(modules, tables, ranks=8)
    assert list(modules) == ["sparse.ebc"]
    assert json.loads(plan.to_json()) == figures["plan"]
    assert run(f"{line} --plan torchrec.json --ranks 8") == 0
    said = capsys.readouterr().out
    assert "torchrec.json: yours" in said and "nothing better than" in said
    assert run(f"{line} {form}") == 0
    said = capsys.readouterr()
    assert "name the module, or read" in said.err
    assert "for 'sparse_arch.embedding_bag_collection' of the model" in said.out
    for option, fault in {
        "--format torchrec": "is the form of --out",
        "--module a": "--format",
    }.items():
        assert run(f"{line} {option}") == 2
        assert fault in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("shard", "default: all of the platform"),
        ("predict", "ranks that take part; default: all of the platform"),
        ("explore", "several numbers to choose from; default: all of the platform"),
        ("report", "ranks that take part; default: all of the platform"),
        ("compare", "ranks that take part; default: all of each platform"),
        ("scaling", "up to all of the platform"),
        ("capture", "ranks that the script is told of (WORLD_SIZE); default 1"),
        ("demo", "default perfkit-report.html"),
    ],
)
def test_help_of_an_option_is_about_its_command(command: str, said: str, capsys: Capture) -> None:
    assert run([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert said in text
    assert "default of demo" not in text and "default 2 to measure and to place" not in text


def test_published_tables_without_sizes_get_them_on_the_line(capsys: Capture) -> None:
    line = "shard --platform h100-sxm-8 --tables dlrm-datasets-2021 --dim 4 --batch 64 --steps 1"
    assert run(line) == 2
    assert "pass rows=" in capsys.readouterr().err
    assert run(line + " --rows 1000000") == 0
    assert "856 tables" in capsys.readouterr().out


def find_command(name: str) -> Command:
    """A command of the group."""
    command = perfkit_group.get_command(click.Context(perfkit_group), name)
    assert isinstance(command, Command)
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_help_says(name: str, capsys: Capture) -> None:
    summary = COMMANDS[name].summary
    assert str(find_command(name).help).startswith(summary)
    assert run("--help") == 0
    assert f"{name} {summary}" in " ".join(capsys.readouterr().out.split())


def test_each_command_has_a_file_and_an_entry() -> None:
    """A file that defines a command is named by one entry, and each entry names another file."""
    files = set()
    for path in (ROOT / "perfkit" / "commands").glob("*.py"):
        if re.search(r"^@click\.command\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            files.add(f"perfkit.commands.{path.stem}")
    modules = [entry.module for entry in COMMANDS.values()]
    assert set(modules) == files
    assert len(modules) == len(files), "one command a file"


#: Commands of which every example is run; the others measure, or read files of the user.
QUICK = ("predict", "compare", "platforms", "models", "stacks", "tables")


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_that_work(name: str, capsys: Capture) -> None:
    examples = find_command(name).examples
    assert run([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1 - len(examples) :] == ["Examples:", *(f"  {line}" for line in examples)]
    assert examples
    for example in examples:
        program, command, *words = shlex.split(example)
        assert (program, command) == ("perfkit", name)
        find_command(name).make_context(name, words)  # raises an error for a bad line
        if name in QUICK or "--tables" in words:
            assert run([command, *words]) == 0
            assert capsys.readouterr().out


def test_a_bad_example_is_noticed() -> None:
    with pytest.raises(click.UsageError, match="--speed"):
        find_command("predict").make_context("predict", ["--speed", "high"])


@pytest.mark.parametrize(
    "line", ["--traces a b --base c", "--traces a --base c --traces b", "--base c --traces a b"]
)
def test_several_files_follow_one_option(line: str) -> None:
    words = ["--out", "p.toml", *line.split()]
    given = find_command("calibrate").make_context("calibrate", words).params
    assert (given["traces"], given["base"]) == (("a", "b"), "c")


@pytest.mark.parametrize(
    ("words", "begun", "completed"),
    [([], "pre", "predict"), (["predict"], "--ba", "--batch"), (["calibrate"], "--tr", "--traces")],
)
def test_a_shell_can_complete_commands_and_options(
    words: list[str], begun: str, completed: str
) -> None:
    completion = ShellComplete(perfkit_group, {}, "perfkit", "_PERFKIT_COMPLETE")
    assert [item.value for item in completion.get_completions(words, begun)] == [completed]


@pytest.mark.parametrize(
    "words", [["nope"], ["predict", "--model", "--platform"], ["platforms", "x"]]
)
def test_a_shell_that_completes_a_bad_line_is_told_nothing(words: list[str]) -> None:
    completion = ShellComplete(perfkit_group, {}, "perfkit", "_PERFKIT_COMPLETE")
    assert isinstance(completion.get_completions(words, "h"), list)


@pytest.mark.parametrize("source", ["--measurements", "--traces"])
def test_other_ranks_wait_for_nothing_where_nothing_is_measured(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    more = {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "run", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(perfkit, "calibrate", fail(AssertionError("rank 0 alone calibrates")))
    measure = "perfkit.calibration.cpu_measure.measure_collectives"
    monkeypatch.setattr(measure, fail(AssertionError("nothing is measured")))
    assert run(f"calibrate {source} m.json --out P.toml") == 0


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import perfkit", "click"),
        ("from perfkit.__main__ import main; main(['--help'])", "numpy"),
        ("from perfkit.commands.running import run_command", "click"),
    ],
)
def test_what_is_not_needed_is_not_imported(statement: str, absent: str) -> None:
    """Help of perfkit appears at once, and programs that import perfkit need no click."""
    assert start(f"{statement}; sys.exit({absent!r} in sys.modules)").returncode == 0


def test_help_names_every_format_that_is_known(capsys: Capture) -> None:
    assert run("predict --help") == 0
    help_of_predict = capsys.readouterr().out
    assert run("predict --model bert-base --platform h100-sxm-8 --dtype fp31") == 2
    [known] = re.findall("known are ([^;\n]*)", capsys.readouterr().err)
    assert all(dtype in help_of_predict for dtype in known.split(", "))


PREDICT = "predict --model gpt2 --platform h100-sxm-8"
SHARD = "shard --model dlrm-default --platform h100-sxm-8 --ranks 2"
#: Mistaken commands, and what a user of the command line can do about them.
MISTAKES = {
    f"{PREDICT} --parallel hsdp": "take --dp, --zero 3 and --shards",
    f"{PREDICT} --parallel tp": "known are ddp, zero1, zero2, fsdp",
    f"{PREDICT} --sequence 4096": "take --sequence 1024 or less, or another model",
    f"{PREDICT} --batch 1.5": "argument --batch: '1.5' is no whole number; write it in digits",
    f"{PREDICT} --tokens 1T": "argument --tokens: '1T' is no plain number, such as 0.5 or 1e12",
    f"{PREDICT} --loading slow": "argument --loading: 'slow' is no number",
    f"{PREDICT} --price 2": "the amount of work is missing; give --iterations or --samples or --tokens",
    f"{PREDICT} --tokens 1e9 --samples 2": "amounts are tokens, samples; give one of",
    f"{PREDICT} --tokens 1e9 --restart 3": "restart is given; .* give --mtbf, llama-3 for example",
    f"{PREDICT} --tokens 1e9 --mtbf llama-3": "give --checkpoint-time, the seconds for which",
    f"{PREDICT} --tokens 1e9 --mtbf llama --checkpoint-time 3": "did you mean 'llama-3'",
    f"{PREDICT} --tokens 1e9 --mtbf 3y --checkpoint-time 3": "mtbf: '3y' is no number with one of the units",
    f"{PREDICT} --tokens 1e9 --jitter 2": "jitter is 2.0; it must be a number of 0 or more, at most 1$",
    f"{PREDICT} --tokens 1e9 --mtbf 1e9 --checkpoint-time 1 --deadline 2027-01-01": "give --start, too",
    f"{PREDICT} --tokens 1e9 --jitter 2%": "jitter is .*; name one share, such as 0.02",
    f"{PREDICT} --tokens 1e9 --jitter 0.1 0.2": "name one share, such as 0.02, one training log",
    f"{PREDICT} --tokens 1e9 --mtbf 1e9 --checkpoint-time 1 --deadline soon": "deadline is 'soon'; it must",
    f"{PREDICT} --tokens 1e9 --mtbf 1e9 --checkpoint-time 1 --write-rate 3": "write_rate is given; --check",
    f"{PREDICT} --mixed": "--mixed is given with --dtype fp32; .* take --dtype bf16 or fp16, or leave",
    f"{PREDICT} --ranks 16": r"take at most 8, or 2 nodes: --platform h100-sxm-8x2$",
    f"{PREDICT} --vp 2": "unrecognized arguments: --vp; .*perfkit predict takes --model, .*--batch",
    f"{PREDICT} --tp 5": "--tp x --pp x --cp is 5, which does not divide the 8 ranks; give --dp",
    f"{PREDICT} --tp 5 --dp 1": "these ranks cannot share heads of the model, 12; tp, 5, must divide it",
    f"{PREDICT} --tp 2 --dp 1 --ranks 4": "--ranks is 4, and --tp x --pp x --cp x --dp is 2; leave --ranks out",
    f"{PREDICT} --ranks 8 --dp 1 --schedule zero_bubble": "--dp is 1; leave --ranks out, or make these 8$",
    f"{PREDICT} --checkpoint-layers 8": "take --checkpoint, or leave --checkpoint-layers out$",
    f"{PREDICT} --tp 2 --checkpoint-layers 8": "take --checkpoint, or leave --checkpoint-layers out$",
    f"{PREDICT} --checkpoint-group 2": "take --checkpoint without --checkpoint-layers, or leave --ch",
    f"{PREDICT} --tp 2 --parallel fsdp": "parallel is given; .*--tp, .* say how ranks share",
    f"{PREDICT} --dp 8 --zero 3 --batch 4": "; more ranks than sequences share each sequence with cp",
    f"{PREDICT} --lora-rank 8 --offload activations": (
        "how ranks share it does not go with lora_rank of the model, 8, as offload is 'activations'; "
    ),
    f"{PREDICT} --dtype bf16 --mixed --tp 2 --stack ddp": "take --stack fsdp or --stack megatron",
    "predict --model dlrm-mlperf --platform h100-sxm-8 --tp 2": "tp is given; a DLRM has none",
    f"{PREDICT} --optimizer sgdd": "optimizer is 'sgdd'; known are .*did you mean 'sgd'",
    f"{PREDICT} --lora-rank 8 --lora-modules q_proj,up": "lora_modules is 'up'; known are q_proj",
    f"{PREDICT} --checkpoint all": "checkpoint is 'all'; known are",
    "predict --model config.json --platform h100-sxm-8": "config.json",
    "predict --model dlrm-mlperf --platform h100-sxm-8 --lora-rank 8": "lora_rank is given; a DLRM",
    "predict --model gpt2 --platform h100-sxm-8x2 --batch 3": (
        "take --batch 16 or a multiple of it, or fewer --ranks$"
    ),
    "predict --model llama3 --platform h100-sxm-8": "did you mean llama-3-8b, llama-3-70b, .*perfkit models lists all$",
    "predict --model meta-llama/Llama-9 --platform h100-sxm-8": "name the config.json of a model, or its folder",
    f"{PREDICT} --measured soon": "measured is 'soon'; .*such as 44ms, or the file of a training log$",
    f"{PREDICT} --measured 0": "measured is 0.0; it must be a number above 0$",
    f"{PREDICT} --nodes 0": "nodes is 0; it must be a whole number above 0$",
    "scaling --model gpt2 --platform h100-sxm-8 --batch 3 --ranks 2": "take a multiple of 2, or --strong$",
    "scaling --model dlrm-default --platform h100-sxm-8 --parallel fsdp": "parallel is given; a DLRM",
    "compare h100-sxm-8 h200-sxm-8 --batch 8": "batch is given; .*--model, which is not named; leave it out",
    "compare h100-sxm-8": "platforms are h100-sxm-8; name two, such as perfkit compare a100-sxm-8 h100",
    "tune runs.csv --model dlrm-default --platform h100-sxm-8": "Transformers alone are fitted; take perfkit calibrate",
    "tune no.csv --model gpt2 --platform h100-sxm-8": "no.csv cannot be read",
    "report --model gpt2 --platform h100-sxm-8 --out page.txt": "page.txt",
    "explore --model llama-3-70b --platform h100-sxm-8 --ranks 8 --batch 8 --dtype bf16 --mixed": (
        r"take perfkit predict --tp \d .*--offload \w+ \(fits with "
    ),
    "explore --model gpt2 --platform h100-sxm-8 --ranks 2 --batch 8 --samples 9": "give --tokens$",
    "explore --model gpt2 --platform h100-sxm-8 --ranks 2 --batch 8 --price 9": "give --tokens of the whole",
    "compare h100-sxm-8 a100-sxm-8 --ranks 2 --memory 8GB": (
        "arguments: --memory; perfkit compare has no such option, which perfkit explore"
    ),
    "predict --model Qwen/Qwen3-8B-Base --platform h100-sxm-8": "did you mean qwen3-8b. Or name",
    f"{PREDICT} --measured nolog.log": "measured is 'nolog.log', and there is no such file; name the",
    f"{PREDICT} --corrected mine.toml": "corrected is given; .*give --measured, too$",
    f"{PREDICT} --measured 1 --corrected mine": "corrected is 'mine'; a platform file ends with .toml",
    "shard --tables dlrm-mlperf --platform h100-sxm-8": "name it with --model dlrm-mlperf$",
    "platforms h100": "unrecognized arguments: h100; perfkit platforms takes --json",
    f"{SHARD} --memory 80Gb": "'80Gb' is no number with one of the units B, kB, .* write it such as 80GB",
    f"{SHARD} --format torchrec": "name that file, too, or leave --format out$",
    "shard --tables mlperf-dlrm-v1 --platform h100-sxm-8 --ranks 2 --memory 9e9 --steps 9": (
        "or put large tables into host memory: --kernels fused,uvm_caching$"
    ),
    f"{SHARD} --plan missing.json": "name a plan that perfkit shard --out has written",
    "shard --tables dlrm-datasets-2021 --platform h100-sxm-8": "pass --dim, 64 for example",
    "shard --tables mlperf-dlrm-v1 --platform h100-sxm-8 --rows 9": "leave --dim and --rows out",
    "calibrate --out x.toml --from-nccl-logs cut.log --base h100-sxm-8": "--partial keeps the 2 measurements",
    "calibrate --out x.toml --from-nccl-logs cut.log --base h100-sxm-8 --ranks-per-node 0": (
        "ranks_per_node is 0; it must be a whole number above 0"
    ),
}
#: What is no advice for a command line: calls and keywords of Python.
PYTHON = re.compile(r"\w\(|\b[a-z_]+=[\w'\"(\[]|\bTrue\b|\bFalse\b|\bNone\b")


@pytest.mark.parametrize(("command", "said"), MISTAKES.items(), ids=[*MISTAKES])
def test_an_error_of_a_command_names_what_its_user_can_do(
    command: str, said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    head = "#  Rank  0 Pid 7 on a device  0 [0x00] X\n#  Rank  1 Pid 8 on a device  1 [0x01] X\n"
    row = "1048576 262144 float sum -1 10.49 100.00 100.00 0 10.49 100.00 100.00 0\n"
    Path("cut.log").write_text(f"{head}{row}2097152 524288 float sum -1 20.\n")
    code = main(command.split())
    text = capsys.readouterr().err
    assert code == 2 and text.count("\n") == 1 and re.search(said, text.strip()), text
    assert not PYTHON.search(text), text


def test_the_plan_that_is_written_is_told_from_a_faster_one(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    perfkit.Plan.round_robin(8, ranks=2).save("mine.json")
    judge = perfkit.judge_plan

    def judge_faster(*words: Any, **limits: Any) -> Any:
        judged = judge(*words, **limits)
        found = judged.found.prediction
        parts = {name: time / 2 for name, time in found.parts.items()}
        return replace(judged, yours=replace(found, time=found.time / 2, parts=parts))

    for judging, said in ((judge, "$"), (judge_faster, "; that of mine.json is faster$")):
        monkeypatch.setattr(perfkit, "judge_plan", judging)
        assert main(f"{SHARD} --steps 9 --plan mine.json --out best.json".split()) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if "written to" in line]
        assert re.search(said, line) and ("faster" in line) == (judging is judge_faster)


def test_a_strategy_of_the_command_line_is_that_of_python(capsys: Any) -> None:
    words = (
        "--batch 32 --dtype bf16 --mixed --tp 2 --pp 2 --dp 2 --micro-batch 2 --chunks 2 --zero 1"
    )
    words += " --schedule interleaved --sequence-parallel --checkpoint --stack megatron --json -"
    assert main(f"{PREDICT} {words}".split()) == 0
    time = json.loads(capsys.readouterr().out)["time_s"]
    strategy = perfkit.Strategy(
        tp=2,
        pp=2,
        dp=2,
        micro_batch=2,
        schedule="interleaved",
        chunks=2,
        zero=1,
        sequence_parallel=True,
        checkpoint="full",
    )
    model = perfkit.Transformer.preset("gpt2", batch=32, dtype="bf16", mixed=True)
    with keep_quiet():
        found = perfkit.predict(model, "h100-sxm-8", strategy=strategy, stack="megatron")
    assert time == pytest.approx(found.time, rel=1e-9)


SMALL = "--model gpt2 --batch 16 --sequence 256 --dtype bf16"


def test_all_ranks_of_the_platform_take_part_where_none_are_given(capsys: Any) -> None:
    for command in ("predict", "explore"):
        assert main(f"{command} {SMALL} --platform h100-sxm-8".split()) == 0
        said = capsys.readouterr().out
        assert "ranks: 8, all of h100-sxm-8; --ranks takes another number" in said
        assert main(f"{command} {SMALL} --platform h100-sxm-8 --ranks 4".split()) == 0
        assert "another number" not in capsys.readouterr().out
    counts = {"--micro-batch 1": 8, "--tp 2 --dp 2": 4, "--tp 2 --ranks 4": 4, "--ranks 1": 1}
    for more, ranks in counts.items():
        assert main(f"predict {SMALL} --platform h100-sxm-8 --json - {more}".split()) == 0
        assert json.loads(capsys.readouterr().out)["ranks"] == ranks


def test_a_strategy_without_dp_takes_all_ranks_and_one_with_it_says_how_many(capsys: Any) -> None:
    said = {
        "--tp 2": "Strategy(tp=2, pp=1, dp=4)",
        "--tp 2 --zero 1": "ranks: 8, all of h100-sxm-8, with --dp 4; --dp or --ranks takes another",
        "--tp 2 --dp 2": "ranks: 4 of the 8 of h100-sxm-8, as --tp x --pp x --cp x --dp says",
    }
    for more, line in said.items():
        assert main(f"predict {SMALL} --platform h100-sxm-8 {more}".split()) == 0
        assert line in capsys.readouterr().out


def test_a_name_of_the_hub_is_that_of_its_preset(capsys: Any) -> None:
    line = f"predict {SMALL} --platform h100-sxm-8 --ranks 1 --json -"
    assert main(line.replace("gpt2", "openai-community/GPT2").split()) == 0
    assert json.loads(capsys.readouterr().out)["workload"] == "gpt2, batch 16, sequence 256"


def test_a_file_of_ones_own_goes_to_many_nodes(capsys: Any) -> None:
    perfkit.load_platform("h100-sxm-8").save("mine.toml")
    assert main(f"predict {SMALL} --platform mine.toml --nodes 2 --json -".split()) == 0
    found = json.loads(capsys.readouterr().out)
    with keep_quiet():
        model = perfkit.Transformer.preset("gpt2", batch=16, sequence=256, dtype="bf16")
        two = perfkit.load_platform("h100-sxm-8").with_nodes(2)
        expected = perfkit.predict(model, two, ranks=16)
    assert found["ranks"] == 16
    assert found["time_s"] == pytest.approx(expected.time, rel=1e-9)


def test_a_measured_time_stands_beside_the_prediction(capsys: Any) -> None:
    assert main(f"predict {SMALL} --platform h100-sxm-8 --measured 500ms --json -".split()) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["measured"]["seconds"] == 0.5
    assert figures["measured"]["ratio"] == pytest.approx(0.5 / figures["time_s"])
    assert figures["measured"]["is_inside"] is False
    assert main(f"predict {SMALL} --platform h100-sxm-8 --measured 0.5".split()) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "times as long as predicted, outside of the 80 % interval: 500 ms measured" in first


def test_the_platform_that_a_measurement_corrects_is_written(capsys: Any) -> None:
    line = f"predict {SMALL} --platform h100-sxm-8 --measured 500ms --corrected mine.toml"
    assert main(line.split()) == 0
    said = capsys.readouterr().out
    assert "--corrected FILE has all resources x" in " ".join(said.split())
    assert said.splitlines()[-1] == "written to mine.toml"
    assert main(f"predict {SMALL} --platform mine.toml --json -".split()) == 0
    assert json.loads(capsys.readouterr().out)["time_s"] == pytest.approx(0.5, rel=0.02)


def test_scaling_on_the_command_line_is_that_of_python(capsys: Any) -> None:
    line = f"scaling {SMALL} --platform h100-sxm-8 --ranks 1 8 --strong"
    assert main([*line.split(), "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    model = perfkit.Transformer.preset("gpt2", batch=16, sequence=256, dtype="bf16")
    with keep_quiet():
        expected = perfkit.scaling(model, "h100-sxm-8", [1, 8], strong=True)
    assert rows == expected.table().to_dicts()
    assert main(line.split()) == 0
    said = capsys.readouterr().out
    assert "efficiency" in said and "100.0%" in said


def test_compare_names_both_platforms_and_the_iteration(capsys: Any) -> None:
    assert main(f"compare a100-sxm-8 h100-sxm-8 {SMALL} --ranks 2".split()) == 0
    said = capsys.readouterr().out
    first, *others = said.splitlines()
    assert first.startswith("h100-sxm-8 takes ") and "gpt2, batch 16, sequence 256" in first
    assert first not in others, "the answer is said once"
    assert "main memory bandwidth" in said


def test_runs_of_a_file_tune_a_platform(capsys: Any) -> None:
    model = perfkit.Transformer.preset("gpt2", batch=16, sequence=256, dtype="bf16")
    slower = perfkit.load_platform("a100-sxm-8").with_scale(peak=0.8, memory=0.8)
    lines = ["dp,micro_batch,seconds"]
    ways = [(8, 1), (8, 2), (4, 1), (4, 2), (2, 4)]
    strategies = [perfkit.Strategy(dp=dp, micro_batch=size) for dp, size in ways]
    priced = perfkit.explore(model, slower, [8, 4, 2], strategies=strategies)
    for strategy, size in ways:
        row = priced.table().filter(dp=strategy, micro_batch=size).to_dicts()[0]
        lines.append(f"{strategy},{size},{row['time_s']}")
    Path("runs.csv").write_text("\n".join(lines))
    assert main(f"tune runs.csv {SMALL} --platform a100-sxm-8 --out tuned.toml".split()) == 0
    said = capsys.readouterr().out
    assert said.startswith("5 runs, ") and "written to tuned.toml" in said
    assert perfkit.load_platform("tuned.toml").device.peaks["bf16"].value < 312e12


def test_a_report_has_measurement_cost_and_strategies(capsys: Any) -> None:
    line = f"report {SMALL} --platform h100-sxm-8 --measured 0.5 --price 2 --samples 1e6 --out page.html"
    assert main([*line.split(), "--title", "For the boss"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "times as long as predicted" in said[0]
    assert "1e+06 samples" in said[1]
    assert "the fastest of" in said[-2] and said[-1] == "written to page.html"
    page = Path("page.html").read_text(encoding="utf-8")
    assert "For the boss" in page and "Pareto front" in page


def test_a_page_has_the_cost_and_that_the_run_cannot_be(capsys: Any, monkeypatch: Any) -> None:
    notes_of_page = []

    def keep_notes(*results: Any, path: str, notes: str) -> Path:
        notes_of_page.append(notes)
        return Path(path)

    monkeypatch.setattr("perfkit.reports.page.report", keep_notes)
    line = "predict --model gpt2 --platform h100-sxm-8 --ranks 1 --price 2 --tokens 1e9 --report x.html"
    for batch, cannot_be in ((1, False), (4096, True)):
        assert main(f"{line} --batch {batch}".split()) == 0
        said = capsys.readouterr()
        assert notes_of_page[-1] in said.out
        assert notes_of_page[-1].startswith("1e+09 tokens: ")
        note = "this run cannot be: a rank needs"
        assert (note in notes_of_page[-1]) == cannot_be
        assert note not in said.err  # said once


def test_the_way_out_of_too_little_memory_can_be_typed(capsys: Any) -> None:
    line = "predict --model gpt2 --platform h100-sxm-8 --batch 4096 --json -"
    for more in ("", "--parallel fsdp", "--tp 2 --micro-batch 512"):
        assert main(f"{line} {more}".split()) == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        [advice] = [text for text in warnings if "does not fit" in text]
        assert not PYTHON.search(advice), advice
        if "--tp" in more:
            continue
        [passes] = re.findall(r"take --accumulate (\d+) \(frees [^:]*: fits", advice)
        assert main(f"{line} {more} --accumulate {passes}".split()) == 0
        again = json.loads(capsys.readouterr().out)["warnings"]
        assert not [text for text in again if "does not fit" in text]


SMALL_LLAMA = "predict --model llama-3.2-1b --sequence 1024 --batch 8 --dtype bf16 --json -"


def test_adapters_of_the_command_line_are_those_of_python(capsys: Any) -> None:
    words = "--platform h100-sxm-8 --ranks 1 --lora-rank 16 --checkpoint --checkpoint-layers 6"
    modules = ["--lora-modules", "q_proj, v_proj"]
    assert main([*SMALL_LLAMA.split(), *words.split(), *modules]) == 0
    time = json.loads(capsys.readouterr().out)["time_s"]
    model = perfkit.Transformer.preset(
        "llama-3.2-1b",
        batch=8,
        sequence=1024,
        dtype="bf16",
        lora_rank=16,
        lora_modules=["q_proj", "v_proj"],
        checkpoint=True,
        checkpoint_layers=6,
    )
    with keep_quiet():
        found = perfkit.predict(model, "h100-sxm-8")
    assert time == pytest.approx(found.time, rel=1e-9)


def test_offload_of_the_command_line_is_that_of_python(capsys: Any) -> None:
    words = "--platform h100-sxm-8 --dp 8 --zero 2 --offload activations --checkpoint"
    assert main([*SMALL_LLAMA.split(), *words.split()]) == 0
    time = json.loads(capsys.readouterr().out)["time_s"]
    model = perfkit.Transformer.preset("llama-3.2-1b", batch=8, sequence=1024, dtype="bf16")
    strategy = perfkit.Strategy(dp=8, zero=2, offload="activations", checkpoint="full")
    with keep_quiet():
        found = perfkit.predict(model, "h100-sxm-8", strategy=strategy)
    assert time == pytest.approx(found.time, rel=1e-9)


def test_a_configuration_of_the_hub_is_a_model(capsys: Any) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1000}
    Path("config.json").write_text(json.dumps(config))
    for model in ("config.json", "."):
        words = f"predict --model {model} --platform h100-sxm-8 --ranks 1 --batch 2 --sequence 128 --json -"
        assert main(words.split()) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["workload"] == "llama, batch 2, sequence 128"

    Path("gpt2").mkdir()
    Path("config.json").rename("gpt2/config.json")
    for model, workload in (("gpt2", "gpt2"), ("./gpt2", "llama")):
        words = f"predict --model {model} --platform h100-sxm-8 --ranks 1 --batch 2 --sequence 128 --json -"
        assert main(words.split()) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["workload"] == f"{workload}, batch 2, sequence 128", "a preset is no folder"


def test_a_name_of_the_hub_is_told_how_to_download_it(capsys: Any) -> None:
    words = "predict --model meta-llama/Llama-9-8B --platform h100-sxm-8"
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert "`hf download meta-llama/Llama-9-8B config.json --local-dir Llama-9-8B`" in said


def test_hybrid_shards_are_tried_where_asked_for(capsys: Any) -> None:
    with keep_quiet():
        model = perfkit.Transformer.preset("gpt2", batch=16, sequence=256, dtype="bf16")
        hybrid = perfkit.Strategy.hsdp(shards=4, replicas=2)
        searched = perfkit.explore(model, "h100-sxm-8", 8)
        asked = perfkit.explore(model, "h100-sxm-8", strategies=[hybrid])
    assert asked.best == hybrid
    assert not [one for one in searched.table().to_dicts() if one.get("shards", 0)]
    words = "--platform h100-sxm-8 --zero 3 --shards 4 --json -"
    assert main(f"predict {SMALL} {words}".split()) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 8


def test_explore_names_the_strategy_that_python_finds(capsys: Any) -> None:
    words = "explore --model gpt2 --platform h100-sxm-8 --ranks 2 4 --batch 8 --dtype bf16 --mixed"
    assert main([*words.split(), "--report", "explored.html"]) == 0
    model = perfkit.Transformer.preset("gpt2", batch=8, dtype="bf16", mixed=True)
    best = perfkit.explore(model, "h100-sxm-8", ranks=[2, 4]).best
    assert str(best) in capsys.readouterr().out.splitlines()[0]
    assert Path("explored.html").stat().st_size > 10_000


def test_iterations_of_gpus_are_not_measured_without_any(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    torch = pytest.importorskip("torch", reason="measuring needs torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in ("check --platform h100-sxm-8", "shard --measure --platform h100-sxm-8"):
        assert main(words.split()) == 2
        said = capsys.readouterr().err
        assert "'h100-sxm-8', which has GPUs; this command measures" in said
        assert "ranks" not in said and "device" not in said


@pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
def test_what_a_run_costs_is_that_of_python(capsys: Any) -> None:
    line = "predict --model bert-base --platform h100-sxm-8 --ranks 8 --batch 256 --dtype bf16"
    failing = (
        "--mtbf 1e8 --checkpoint-time 30 --restart 300 --start 2026-12-01 --deadline 2026-12-20"
    )
    assert main(f"{line} --json - --price 2 --tokens 1e12 --jitter 0.01 {failing}".split()) == 0
    figures = json.loads(capsys.readouterr().out)["cost"]
    model = perfkit.Transformer.bert("bert-base", batch=256, dtype="bf16")
    run = perfkit.predict(model, "h100-sxm-8", ranks=8).cost(
        2.0, tokens=1e12, jitter=0.01, mtbf=1e8, checkpoint=30.0, restart=300.0, start="2026-12-01"
    )
    assert figures["cost"] == pytest.approx(run.cost)
    assert figures["hours"] == pytest.approx(run.hours)
    assert figures["deadline"]["chance"] == pytest.approx(run.chance_by("2026-12-20"))
    assert figures["chances"] == run.table().to_dicts()
    assert main(f"{line} --price 2 --iterations 1e6".split()) == 0
    text = capsys.readouterr().out.splitlines()[-1]
    assert text.startswith("1e+06 iterations: ")
    assert "at 2 an hour; failures and checkpoints are not counted (--mtbf)" in text
    assert main(f"{line} --tokens 1e12 {failing[:-10]}20d".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(each.startswith("  done in 20 days with a chance of ") for each in lines)


def test_traces_of_one_step_are_no_jitter(capsys: Any) -> None:
    folder = Path(__file__).parent / "data"
    traces = [str(folder / f"step_rank{rank}.kineto.json") for rank in range(2)]
    line = "predict --model gpt2 --platform h100-sxm-8 --ranks 8 --iterations 1e6 --jitter"
    assert main([*line.split(), *traces]) == 2
    error = capsys.readouterr().err
    assert "has one step of 2 ranks, which does not tell chance from ranks that are slow" in error
    ending = (
        "record several steps (torch.profiler.schedule(active=10)), or give --jitter as a number"
    )
    assert error.strip().endswith(ending)
    assert main(["trace", *traces]) == 0
    told = capsys.readouterr().out
    assert "one step does not tell chance from slow ranks: 2 ranks differ by 7.4% in it" in told
    assert "rank 1 took longest, 5.3% more than the mean rank" in told
    assert "of 4,096" not in told


def test_explore_ranks_by_cost(capsys: Any) -> None:
    line = "explore --model gpt2 --platform h100-sxm-8 --ranks 2 4 --batch 32 --dtype bf16"
    assert main(f"{line} --price 2 --tokens 1e11 --mtbf 1e8 --checkpoint-time 9".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    [first] = [place for place, text in enumerate(lines) if text.startswith("cheapest: ")]
    assert lines[first + 2].split()[:5] == ["ranks", "days", "gpu", "hours", "cost"]
    assert [text.split()[0] for text in lines[first + 3 : first + 5]] in (["2", "4"], ["4", "2"])
