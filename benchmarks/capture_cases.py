"""Small awkward steps that once broke captures: does each behave as it should?

python -m benchmarks.capture_cases [--folder FOLDER]

FOLDER has the programs garbage.py, zeros.py, minimal.py and probes.py, each of which prints a line for a
case; by default it is shared/cases/capture beside the checkout. Nothing is measured, and nothing was
fitted to the cases. What each should do is stated here: a line must have the words of its case.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.helpers.command import command
from benchmarks.helpers.tables import lay_out

_CHECKOUT = Path(__file__).resolve().parents[1]
#: Longest time of one program [s].
_LONGEST = 1800
#: What the line of a case has that was captured.
_CAPTURED = r"^(?!!!)"


@dataclass(frozen=True)
class Case:
    """What a case should do.

    Parameters
    ----------
    name : str
        Name in the line that its program prints.
    should : str
        What it should do, in words.
    words : str
        Regular expression of the rest of its line.
    """

    name: str
    should: str
    words: str


def _captured(*names: str) -> list[Case]:
    """Cases that should be captured."""
    return [Case(name, "captured", _CAPTURED) for name in names]


def _refused(name: str, reason: str) -> Case:
    """A case that should be refused for this reason."""
    return Case(name, f"refused: {reason}", rf"^!! (Refused|ValueError): .*{reason}")


#: Cases by the program that prints them.
CASES = {
    "garbage": [
        Case(
            "KNOWN, but never computed:",
            "only what follows from known tensors",
            r"^(?!.*'(index|embedding|empty_like|new_empty)')",
        ),
        Case("unknown, as they must be:", "the other 70 unknown", r"'index'.*'index_select'"),
        Case("refused", "a branch on a frozen convolution is refused", r"needs one in .*line 38"),
    ],
    "zeros": [
        Case("cpu", "arrays are zeros of their own", r": 0 of 60"),
        Case("cuda", "arrays are zeros of their own", r": 0 of 60"),
    ],
    "minimal": [
        *_captured(
            "deepcopy_batchnorm",
            "averaged_model_batchnorm",
            "ne_of_tensors",
            "categorical",
            "normal_rsample",
            "pack_padded",
            "pack_padded_known_outside",
            "bincount_counts",
            "ddp_find_unused",
            "init_process_group_inside",
            "flex_on_cuda",
            "default_device",
            "generator_on_cuda",
            "storage_to_cuda_0",
            "spectral_norm_parametrized",
            "autograd_functional_hessian",
            "format_of_a_tensor",
            "float_of_a_tensor",
            "int_item",
            "unique_of_passed",
            "clip_error_if_nonfinite",
            "isnan_of_loss",
            "isnan_or_compare",
            "np_random_choice_of_scores",
        ),
        _refused("sparse_matrix", "_sparse_addmm.* has no rule"),
        _refused("sparse_matrix_made_inside", "has no rule"),
        _refused("cuda_type_strings", "types such as torch.cuda.FloatTensor"),
        _refused("jvp_forward_mode", "forward mode"),
        _refused("empty_graph_is_predicted", "no operations"),
        _refused("unique_of_made_inside", "needs one"),
        Case("host_work_beside_gpu", "one transfer", r"'mul_', 'to', 'addmm'"),
        Case(
            "accumulate_over_steps", "a note that calls differ", r"every n-th call|calls .*differ"
        ),
    ],
    "probes": [
        *_captured(
            "ne_of_tensors",
            "accuracy_int_item",
            "float_of_loss",
            "format_of_loss",
            "mean_of_items",
            "tolist_of_losses",
            "device_context",
            "unknown_as_int",
            "grad_is_none_check",
            "model_given_with_real_cuda_name",
            "device_object",
            "amp_object",
            "optimizer_class",
            "nan_check_of_loss",
            "no_grad_only",
            "deterministic_and_anomaly",
            "profiler_in_step",
            "log_np_mean",
            "log_max",
            "log_round",
            "log_exp_perplexity",
            "log_overflow_guard",
            "log_torch_stack_cpu_numpy",
            "log_numpy_mean",
            "metrics_accuracy_sum_tensor",
            "scheduler_step_lr_plateau",
            "own_autocast_rule",
        ),
        Case("host_embedding", "a note on work of the host", r"tensors of the host|on the host"),
        Case("transfer_non_blocking", "pinned is faster", r"\(\{\}, True, 1, [0-4]\."),
        Case("transfer_of_data_made_inside", "one transfer", r"^\(1,"),
        Case("transfers_when_script_has_no_gpu", "cuda, one transfer", r"^\('cuda', 1,"),
        Case("is_cuda", "a GPU is there", r"^\(True, 'cuda', True, [1-9]"),
        Case("rnn_on_cuda", "below 2 ms each", r"^(?!.*'(\d\d+|[2-9])\.\d+ ms')"),
        Case("rnn_on_cuda_amp", "in bf16", "bf16"),
        Case("complex_flops", "8mnk in a complex dtype", "134217728"),
        Case("every_second_step", "a note that calls differ", "differ.*every n-th call"),
        Case("layer_drop", "a note on one draw", "one draw"),
        _refused("custom_op_without_fake", "register_fake"),
        Case("default_device_cuda", "captured, and put back", r"device\(type='cpu'\)"),
        Case("two_branches_by_known_random", "a note on one draw", "one draw"),
        Case("scaled_mm_flops", "a product in FP8", "'gemm'.*2147483648"),
        Case(
            "eigh_svd_price", "eigh and svd take ms", r"'eigh': \('\d{4,} us.*'svd': \('\d{4,} us"
        ),
        _refused("step_with_argument", "takes the arguments batch"),
        _refused("step_itself", "must return the step"),
        _refused("a_tuple_of_model_and_step", "must return the step"),
        _refused("sum_of_sizes_unknown", "needs one in"),
        Case("topk_threshold_share", "80 are chosen", r"^\(torch.Size\(\[80\]\)"),
        Case("argmax_mask_share", "1,000 together", r"Size\(\[100, 10\]\), torch.Size\(\[900, 10"),
        Case("argmax_ne_share", "900 are wrong", r"Size\(\[900, 10\]\)"),
        Case("vocab_argmax_mask", "a note on equal shares", "equally often"),
        Case("inf_masks", "248, or the note", r"Size\(\[248\]\)|count as finite"),
        _refused("attention_flash2_of_transformers", "flash_attn"),
        _refused("empty_step", "no operations"),
        Case("nothing_trained", "a note with 330 numbers", "no weight is trained: the 330"),
        Case("eight_gpu_batch_is_per_rank", "8", r"^8$"),
        Case("data_parallel", "a note", "DataParallel counts as one GPU"),
        _refused("multiprocess_start_method", "another process"),
        _refused("big_real_index", "16,777,216"),
        Case("dynamic_batch_shapes", "a note that calls differ", "calls of the step differ"),
        Case("host_work_beside_gpu", "a note on work of the host", "tensors of the host"),
    ],
}


def _run(program: Path) -> list[str]:
    """The lines that a program prints."""
    environment = {**os.environ, "PYTHONPATH": str(_CHECKOUT)}
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=_LONGEST,
        check=False,
    )
    return done.stdout.splitlines()


def judge_line(case: Case, lines: list[str]) -> str | None:
    """The rest of the line of a case if it does not behave as it should; None if it does.

    Parameters
    ----------
    case : Case
        What it should do.
    lines : list of str
        What its program printed.

    Returns
    -------
    said : str, optional
        The rest of the line, or that there is none.
    """
    begun = f"{case.name} "
    said = [line.removeprefix(begun).strip() for line in lines if line.startswith(begun)]
    if not said:
        return "no line"
    return None if re.search(case.words, said[-1]) else said[-1]


@command({"--folder": {"type": Path, "metavar": "FOLDER", "help": "the four programs"}})
def main(options: Any) -> int:
    """Print the counted table."""
    folder = options.folder or _CHECKOUT.parent / "shared" / "cases" / "capture"
    missing = [name for name in CASES if not (folder / f"{name}.py").is_file()]
    if missing:
        print(
            f"skipped: {folder} has no {missing[0]}.py; name the folder of the cases with --folder"
        )
        return 0
    rows = []
    for program, cases in CASES.items():
        lines = _run(folder / f"{program}.py")
        for case in cases:
            wrong = judge_line(case, lines)
            now = "as it should" if wrong is None else wrong[:110]
            row = {"program": program, "case": case.name, "should": case.should, "now": now}
            rows.append({**row, "ok": "yes" if wrong is None else "no"})
    columns = {name: f"{{{name}}}" for name in ("program", "case", "should", "now", "ok")}
    print(lay_out(rows, columns))
    right = sum(row["ok"] == "yes" for row in rows)
    print(f"\nas they should: {right} of {len(rows)}")
    return 0
