"""The command line: every bad line ends with one clear sentence and exit code 2; predicting needs no torch."""

import io
import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfkit
from perfkit.__main__ import main
from perfkit.calibration import commands
from perfkit.calibration.checks import Comparison
from perfkit.measure.processes import MeasurementError
from perfkit.platform.platform import Platform
from perfkit.workloads.transformer import PRESETS

ROOT = Path(__file__).resolve().parent.parent
GPU = ["predict", "--platform", "h100-sxm-8", "--model"]
BERT = [*GPU, "bert-base"]
FROM = ["calibrate", "--out", "P.toml"]


@pytest.fixture(autouse=True)
def restored_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line shows warnings its own way; that must not outlive a test."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(
        "perfkit.calibration.campaign.run_processes", lambda *_, **__: pytest.fail("something was measured")
    )


def run(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as left:  # argparse leaves by itself
        return int(left.code or 0)


BAD = {
    "unknown-model": ([*GPU, "bert-bse"], "model is 'bert-bse'; known are .*did you mean 'bert-base'"),
    "unknown-platform": (["predict", "--model", "gpt2", "--platform", "h100"], "h100.*not a file|h100.*known"),
    "missing-file": (["predict", "--model", "gpt2", "--platform", "no/such.toml"], "no/such.toml"),
    "batch-zero": ([*BERT, "--batch", "0"], "batch is 0; it must be a whole number above 0"),
    "batch-negative": ([*BERT, "--batch", "-4"], "batch is -4"),
    "batch-huge": ([*BERT, "--batch", str(2**70)], "batch is 1.18059e\\+21.*largest"),
    "batch-nan": ([*BERT, "--batch", "nan"], "argument --batch: .*'nan'"),
    "batch-text": ([*BERT, "--batch", "many"], "argument --batch: .*'many'"),
    "batch-indivisible": ([*BERT, "--batch", "7", "--ranks", "2"], "batch is 7; it must divide by the 2 ranks"),
    "sequence-zero": ([*BERT, "--sequence", "0"], "sequence is 0"),
    "sequence-long": ([*BERT, "--sequence", "513"], "sequence is 513; the model has 512 positions"),
    "sequence-dlrm": ([*GPU, "dlrm-mlperf", "--sequence", "8"], "sequence is given; a DLRM has none"),
    "dtype-unknown": ([*BERT, "--dtype", "fp31"], "dtype is 'fp31'; known are"),
    "ranks-zero": ([*BERT, "--ranks", "0"], "ranks is 0"),
    "ranks-many": ([*BERT, "--batch", "16", "--ranks", "16"], "ranks is 16; platform 'h100-sxm-8' has 8"),
    "ranks-text": ([*BERT, "--ranks", "all"], "argument --ranks"),
    "no-model": (["predict", "--platform", "h100-sxm-8"], "required: --model"),
    "no-platform": (["predict", "--model", "gpt2"], "required: --platform"),
    "no-command": ([], "required: command"),
    "unknown-command": (["predct"], "invalid choice: 'predct'"),
    "unknown-option": ([*BERT, "--speed", "high"], "unrecognized arguments: --speed high"),
    "calibrate-no-out": (["calibrate"], "required: --out"),
    "calibrate-no-folder": (["calibrate", "--out", "no/such/P.toml"], "out is .*folder does not exist; create it"),
    "calibrate-a-folder": (["calibrate", "--out", "."], "out is '.'; it is a folder"),
    "calibrate-ending": (["calibrate", "--out", "mine"], "known by their ending; name it mine.toml"),
    "calibrate-partial": ([*FROM, "--partial", "--from-kernel-database", "h100_sxm"], "partial is given; it"),
    "calibrate-device": (["calibrate", "--out", "P.toml", "--device", "tpu"], "--device: invalid choice: 'tpu'"),
    "calibrate-ranks": (["calibrate", "--out", "P.toml", "--ranks", "0"], "ranks is 0"),
    "calibrate-base-alone": ([*FROM, "--base", "h100-sxm-8"], "base is given; name what to put into it: --from-nccl"),
    "calibrate-no-base": ([*FROM, "--from-nccl-logs", "."], "base is missing; name the platform whose collectives"),
    "calibrate-base": ([*FROM, "--base", "h100", "--from-nccl-logs", "."], "did you mean 'h100-sxm-8'"),
    "calibrate-no-logs": ([*FROM, "--base", "h100-sxm-8", "--from-nccl-logs", "."], "'.' holds no .log, .out, .txt"),
    "calibrate-log": ([*FROM, "--base", "h100-sxm-8", "--from-nccl-logs", "no.log"], "'no.log' is no file; name a log"),
    "calibrate-system": ([*FROM, "--from-kernel-database", "h101_sxm"], "gallery has no node of 'h101_sxm'; name the"),
    "calibrate-both": ([*FROM, "--from-nccl-logs", ".", "--quick"], "quick is given; it is for measuring this machine"),
    "check-no-platform": (["check", "--seed", "1"], "required: --platform"),
    "check-missing-file": (["check", "--platform", "no/such.toml"], "no/such.toml"),
    "check-seed": (["check", "--platform", "h100-sxm-8", "--seed", "-1"], "seed is -1"),
    "check-json": (["check", "--platform", "h100-sxm-8", "--json", "no/such.json"], "json is .*folder does not exist"),
    "demo-report": (["demo", "--report", "no/such/report.html"], "report is .*folder does not exist"),
    "demo-out": (["demo", "--out", "no/such/P.toml"], "out is .*folder does not exist"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_ends_with_one_sentence_and_code_2(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, message = BAD[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(words) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1, err
    assert lines[0].startswith("perfkit")
    assert re.search(message, lines[0]), lines[0]
    assert not [path for path in tmp_path.iterdir() if path.name != "cache"], "nothing is left behind"


BROKEN = {
    "not-toml": ("format = = 1", "line 1"),
    "no-format": ('name = "x"', "format is missing; this perfkit reads formats 1 and 2"),
    "other-format": ("format = 3", "format is 3; this perfkit reads formats 1 and 2"),
    "missing-keys": ('format = 1\nname = "x"', "device"),
    "binary": ("\udcff\udcfe", "cannot be read|utf-8"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_platform_file_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = BROKEN[name]
    file = tmp_path / "P.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert run(["predict", "--model", "gpt2", "--platform", str(file)]) == 2
    err = capsys.readouterr().err.strip()
    assert "\n" not in err
    assert str(file) in err
    assert re.search(message, err), err


@pytest.mark.filterwarnings("always")
def test_a_platform_calibrated_for_other_operations(
    tmp_path: Path, toy: Platform, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no collectives: several ranks cannot be predicted; one rank can, and says what it did not know."""
    other = replace(toy, collectives={}, kernels={k: f for k, f in toy.kernels.items() if k.startswith("gemm.")})
    file = other.save(tmp_path / "other.toml")
    words = ["predict", "--model", "bert-base", "--batch", "2", "--platform", str(file)]
    assert run([*words, "--ranks", "2"]) == 2
    assert "has no model for the collective 'all_reduce'" in capsys.readouterr().err
    assert run([*words, "--dtype", "bf16"]) == 2
    assert "dtype is 'bf16'; known are fp32" in capsys.readouterr().err
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert "not modelled, timed as memory traffic" in out
    assert "  warning: " in out and not err, "what to know is said once"


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("model", [*PRESETS, "dlrm-default", "dlrm-mlperf"])
def test_predict_explains_every_preset(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*GPU, model, "--ranks", "2"]) == 0
    out, _ = capsys.readouterr()
    assert model in out
    assert "2 of 8 ranks of h100-sxm-8" in out
    assert "at least" in out


def test_predict_takes_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BERT, "--batch", "16", "--sequence", "256", "--dtype", "bf16", "--ranks", "8"]) == 0
    assert "bert-base, batch 16, sequence 256 on 8 of 8 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted; what was measured is kept"),
        (
            MeasurementError("measuring process 1 was killed by signal 9"),
            2,
            "measuring process 1 was killed by signal 9",
        ),
        (OSError(28, "No space left on device", "P.toml"), 2, "No space left on device"),
        (
            ModuleNotFoundError("no torch", name="torch"),
            2,
            "torch is not installed; pip install 'perfkit\\[measure\\]'",
        ),
        (ValueError("ranks is 0"), 2, "ranks is 0"),
    ],
    ids=["interrupt", "killed", "full-disk", "no-torch", "value"],
)
def test_what_goes_wrong_later_is_told_in_one_line(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(perfkit, "calibrate", fail)
    assert run(["calibrate", "--out", "P.toml"]) == code
    err = capsys.readouterr().err.strip()
    assert "\n" not in err
    assert re.search(words, err)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MeasurementError("measuring process 1 was killed by signal 9"), 2),
        (ValueError("poor fit"), 2),
        (KeyboardInterrupt(), 130),
        (KeyboardInterrupt(15), 143),
        (KeyError("a bug"), None),
    ],
    ids=repr,
)
@pytest.mark.parametrize("closed", [False, True])
def test_a_command_that_fails_while_measuring_leaves_a_log(
    error: BaseException, code: int | None, closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*_: Any, **__: Any) -> None:
        print("kernels: 10%\rkernels: 20%", file=sys.stderr)
        error.add_note("what the process said")
        raise error

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(commands.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["perfkit", "calibrate", "\udcff"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(perfkit, "calibrate", fail)
    if closed:
        (tmp_path / "out" / "perfkit-run.log").mkdir()
    words = ["calibrate", "--out", str(tmp_path / "out" / "P.toml")]
    if code is None:
        with pytest.raises(KeyError):
            run(words)
    else:
        assert run(words) == code
    log = tmp_path / ("perfkit-run.log" if closed else "out/perfkit-run.log")
    _, told, where, _ = capsys.readouterr().err.split("\n")
    assert told.startswith("perfkit: ") and f"{log} tells more" in where
    text = log.read_text()
    kept = ["command: perfkit calibrate", "processor: ", "numpy: ", "OMP_NUM_THREADS: 3", "what the process said"]
    assert all(part in text for part in (*kept, "kernels: 20%\n", "Traceback (most recent", "in fail", "\\udcff"))
    assert "10%" not in text, "of a bar, what was seen last"


def test_what_a_terminal_cannot_show_takes_nothing_else_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert run(BERT) == 0
    assert b"bert-base" in shown.getvalue() and b"?" in shown.getvalue()


@pytest.mark.filterwarnings("always")
def test_messages_are_one_short_line_that_no_terminal_obeys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where the log of the second goes

    def fail(*_: Any, **__: Any) -> None:
        warnings.warn("one\ntwo\x1b[31m", stacklevel=1)
        raise RuntimeError("one\ntwo\x1b[31m" + "x" * 5000)

    monkeypatch.setattr(perfkit, "check", fail)
    assert run([*BERT, "--spe\ned\x1b[31m", "x" * 5000]) == 2
    assert run(["check", "--platform", "one\ntwo\x1b[31m"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if len(line) < 1200 and line.isprintable()] == lines
    assert [line.split(":")[0] for line in lines] == ["perfkit"] * len(lines) and "\\x1b[31m" in lines[0]


def test_check_writes_its_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {"family": "dlrm", "name": "dlrm-0", "config": {}, "ranks": 1, "predicted_s": 1.1, "low_s": 0.9}
    pair |= {"high_s": 1.3, "measured_s": 1.0, "measured_q1_s": 0.9, "measured_q3_s": 1.2, "flagged": True}
    pair |= {"bottleneck": "GEMM-bound", "noise": 0.02}
    comparison = Comparison((pair,), "toy", {"processor": "x"}, {"python": "3"})
    asked = []
    monkeypatch.setattr(perfkit, "check", lambda platform, **given: asked.append((platform, given)) or comparison)
    out = tmp_path / "pairs.json"
    assert run(["check", "--platform", "toy", "--seed", "5", "--json", str(out)]) == 0
    assert asked == [("toy", {"seed": 5})]
    data = json.loads(out.read_text())
    assert list(data) == ["format", "platform", "machine", "versions", "noise_floor", "runs"]
    assert data["runs"] == [pair]
    text = capsys.readouterr().out
    assert "+10.0%" in text
    assert "unsteady" in text
    assert "noise floor 2.0 %" in text
    assert run(["check", "--platform", "toy", "--models", "all"]) == 0
    assert asked[-1] == ("toy", {"models": "all"})


def test_a_reader_that_stops_reading_ends_a_command_quietly() -> None:
    words = [sys.executable, "-m", "perfkit", "tables"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as command:
        command.stdout.close()
        assert command.stderr.read() == "" and command.wait() == 141


def test_predict_runs_without_torch() -> None:
    """As a user without the extra `measure` would: importing torch fails."""
    code = (
        "import sys; sys.modules['torch'] = None; from perfkit.__main__ import main;"
        "sys.exit(main('predict --model dlrm-mlperf --platform a100-sxm-8 --batch 4096 --ranks 8'.split()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "dlrm-mlperf" in done.stdout


def test_calibrate_without_torch_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest);"
        "from perfkit.__main__ import main; sys.exit(main(['calibrate', '--quick', '--out', sys.argv[1]]))"
    )
    out = tmp_path / "P.toml"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code, out], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 2
    assert "torch is not installed; pip install 'perfkit[measure]'" in done.stderr
    assert not out.exists()


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("doctor", "calibrate", "predict", "shard", "check", "demo", "platforms"))
    assert run(["--version"]) == 0 and capsys.readouterr().out == f"perfkit {perfkit.__version__}\n"


def test_lists_name_what_other_commands_take(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in {
        "platforms": ("h100-sxm-8 ", "zen5-2 "), "models": ("dlrm-mlperf ", "bert-large ", "gpt2-xl "),
        "tables": ("mlperf-dlrm-dcnv2 ",),
    }.items():  # fmt: skip
        assert run([command]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in names), out


def test_every_command_gives_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.json"
    for words in (BERT, ["platforms"], ["models"], ["tables"]):
        assert run([*words, "--json", "-"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert run([*words, "--json", str(file)]) == 0
        assert json.loads(file.read_text()) == shown and f"written to {file}" in capsys.readouterr().out
    assert run([*BERT, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["interval_s"][0] < found["time_s"] < found["interval_s"][1]
    assert sum(row["time_s"] for row in found["breakdown"]) == pytest.approx(found["time_s"])
    for command in ("doctor", "calibrate", "predict", "shard", "check", "demo"):
        assert run([command, "--help"]) == 0 and "--json OUT" in capsys.readouterr().out
