"""What has to be computed: models as the operations of one rank's training iteration.

Main types: `Transformer` and `DLRM` (the models), `Graph` (operations, what they read and write,
what waits for what), `Plan` (which rank holds which table), `Strategy` (how ranks share a
Transformer).

Reading order: `transformer` and its `blocks`, `layers`, `layer_types` (a layer is a record with
`forward` and `backward`), `tape` (what they append to), `iteration` (gradients and updates),
`graph` and `columns` (what a recording becomes), `dlrm` and `placement`, `strategy`; then
`hub_config`, `hub_types` and `hub_parts` (the `config.json` of a model as fields of a Transformer),
`structure`, `sizes` and `symbolic_sizes` (recordings that are filled with sizes), `execution` (eager or
compiled).
"""
