"""``perfkit predict``: the time of one training iteration and what limits it."""

import click

import perfkit as pk
from perfkit.commands import options
from perfkit.commands.command import Command
from perfkit.commands.options import NUMBER, WHOLE, keep_given, refuse_given
from perfkit.commands.outputs import Answer, OutputFiles
from perfkit.commands.presets import build_workload
from perfkit.workloads import dlrm


@click.command(
    "predict",
    cls=Command,
    examples=[
        "perfkit predict --model bert-large --platform h100-sxm-8x8 --ranks 64 --batch 2048 --dtype bf16",
        "perfkit predict --model dlrm-mlperf --platform a100-sxm-8 --ranks 8 --report prediction.html",
    ],
)
@click.option("--model", required=True, help="preset, see perfkit models")
@options.platform
@click.option(
    "--batch", type=WHOLE, help="samples or sequences over all ranks; default: that of the model"
)
@click.option("--dtype", help="fp64, fp32, tf32, bf16, fp16, fp8, as far as the device has it")
@click.option("--mixed", is_flag=True, help="weights stay fp32, products run in --dtype")
@click.option("--sequence", type=WHOLE, help="tokens of one sequence")
@click.option(
    "--parallel", help="what ranks divide: ddp (nothing, the default), zero1, zero2, fsdp"
)
@click.option("--accumulate", type=WHOLE, help="micro-batches per rank; they share the batch")
@click.option("--checkpoint", is_flag=True, help="compute layers again in the backward pass")
@click.option("--ranks", type=WHOLE, help="ranks that take part; default 1")
@click.option(
    "--execution",
    type=click.Choice(("eager", "compiled", "graphs")),
    help="how the iteration runs; default eager",
)
@click.option("--stack", help="software that runs it, see perfkit stacks; default: the usual one")
@click.option(
    "--loading",
    type=NUMBER,
    default=0.0,
    metavar="SECONDS",
    help="time of the data loader per batch of a rank",
)
@options.report
@options.json_file
def predict_command(
    model: str,
    platform: str,
    batch: int | None,
    dtype: str | None,
    mixed: bool,
    sequence: int | None,
    parallel: str | None,
    accumulate: int | None,
    checkpoint: bool,
    ranks: int | None,
    execution: str | None,
    stack: str | None,
    loading: float,
    report: str | None,
    json_file: str | None,
) -> int:
    """Predict one training iteration."""
    from perfkit.platform.estimates import keep_quiet

    files = OutputFiles(json_file, report)
    files.check()
    for_transformers = keep_given(
        sequence=sequence, parallel=parallel, accumulate=accumulate, checkpoint=checkpoint
    )
    if model in dlrm.PRESETS:
        refuse_given("a DLRM has none", **for_transformers)
    changes = keep_given(batch=batch, dtype=dtype, mixed=mixed)
    workload = build_workload(model, **changes, **for_transformers)
    with keep_quiet():  # the explanation has the warnings
        prediction = pk.predict(
            workload,
            platform,
            ranks=ranks,
            execution=execution,
            loading=loading,
            stack=stack,
        )
    figures = {
        "workload": workload.description,
        "platform": prediction.platform.name,
        "ranks": prediction.ranks,
        "time_s": prediction.time,
        "execution": prediction.execution,
        "stack": prediction.stack.name,
        "device_s": prediction.device_time,
        "interval_s": prediction.interval(),
        "lower_bound_s": prediction.lower_bound,
        "serial_s": prediction.serial,
        "bottleneck": prediction.bottleneck,
        "breakdown": prediction.breakdown().to_dicts(),
        "unmodelled_s": dict(prediction.unmodelled),
        "warnings": prediction.warnings,
    }
    files.write(Answer(prediction.explain(), figures, results=[prediction]))
    return 0
