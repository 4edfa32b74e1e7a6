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
        "perfkit predict --model gpt3-6.7b --platform h100-sxm-8x2 --batch 64 --dtype bf16 --mixed --tp 2 --pp 2 --dp 4 --stack megatron",
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
@click.option("--tp", type=WHOLE, help="ranks that share products (tensor parallel)")
@click.option("--pp", type=WHOLE, help="stages of layers (pipeline parallel)")
@click.option("--dp", type=WHOLE, help="replicas of the model; ranks are tp x pp x dp")
@click.option("--micro-batch", type=WHOLE, help="sequences of a replica in one pass")
@click.option("--schedule", help="order of passes: gpipe, 1f1b, interleaved, zero_bubble, ...")
@click.option("--chunks", type=WHOLE, help="chunks of each stage, of interleaved")
@click.option(
    "--zero", type=WHOLE, help="what replicas share: 0 nothing, 1 states, 2 gradients, 3 weights"
)
@click.option("--sequence-parallel", is_flag=True, help="ranks of tp share tokens, too")
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
    tp: int | None,
    pp: int | None,
    dp: int | None,
    micro_batch: int | None,
    schedule: str | None,
    chunks: int | None,
    zero: int | None,
    sequence_parallel: bool,
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
    for_strategies = keep_given(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batch=micro_batch,
        schedule=schedule,
        chunks=chunks,
        zero=zero,
        sequence_parallel=sequence_parallel,
    )
    by_settings = keep_given(parallel=parallel, accumulate=accumulate, checkpoint=checkpoint)
    if model in dlrm.PRESETS:
        refuse_given("a DLRM has none", sequence=sequence, **by_settings, **for_strategies)
    strategy = None
    if for_strategies:
        with_strategy = "--tp, --pp, --dp and --zero say how ranks share the model"
        refuse_given(with_strategy, parallel=parallel, accumulate=accumulate)
        by_settings = {}
        strategy = pk.Strategy(checkpoint="full" if checkpoint else "none", **for_strategies)
    for_transformers = keep_given(sequence=sequence) | by_settings
    changes = keep_given(batch=batch, dtype=dtype, mixed=mixed)
    workload = build_workload(model, **changes, **for_transformers)
    with keep_quiet():  # the explanation has the warnings
        prediction = pk.predict(
            workload,
            platform,
            ranks=ranks,
            execution=execution,
            loading=loading,
            strategy=strategy,
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
