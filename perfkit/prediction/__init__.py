"""From a graph and a platform to the time of one iteration.

Main types: `Prediction` (time, interval, parts, timeline, memory, explanations). `predictor.predict`
is the table of contents.

Reading order: `predictor`; `ranks` (the graphs of all ranks, and those that are alike); `cost` with
`classes` and `lookups` (operations to times); `simulation` (hosts, devices and collectives of all
ranks); `breakdown`, `uncertainty`, `memory`; `result` and `accounts`. Then what a strategy makes
of a Transformer: as operations for the same simulation in `stages` with `stage_operations` and
`stage_programs`; in closed form in `strategies`, whose steps are `strategy_*`, `micro_batches`,
`stage_replicas` and `passes`. `configurations` predicts many sizes at once, `contrast` compares.
"""
