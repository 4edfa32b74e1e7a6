"""Readers of files that other tools write: each file becomes frames or records in base units.

A reader refuses a file that is something else, cut off or impossible, with one line that says what is
wrong and what to do next; what it leaves out it counts.

Read in this order; each format is told alone:

1. `nccl`: `read_nccl_tests` gives a frame of collectives from logs of nccl-tests and rccl-tests;
   `nccl_tables` finds the printed tables in them (`torn_rows` puts rows together that other lines
   tear apart), `nccl_json` reads reports, `nccl_facts` what either says besides (records of
   `log_facts`). `dialects` says which other benchmark wrote a log: `oneccl`, `hccl`, `deepspeed_comm`, `all_reduce_bench`,
   `param_comms`, `osu` and `rccl_files` read those, as rows of `collective_rows`. `rank_bounds` tells
   ranks from bandwidths. `nvbandwidth` reads rates of single links (`LinkRates`).
2. `kineto`: `read_kineto` gives a `TraceFile`, one frame of events of PyTorch's profiler.
   `trace_names` holds the names that PyTorch has changed. `trace_text` unpacks the file,
   `trace_events` parses its events into columns (`trace_numbers` reads times), and
   `trace_arguments` keeps their arguments (`Arguments`).
3. `execution_trace`: `read_execution` gives an `ExecutionTrace`, operations with all operands, and
   `join_traces` finds the events of a `TraceFile` that they belong to.
4. `table_configs`: `read_tables` gives a `TableSet` of embedding tables, from frames, files and
   objects; `tbe_configs` reads those of FBGEMM, `index_arrays` recorded indices
   (`IndexStatistics`). `torchrec_models` finds tables in objects of TorchRec, and `torchrec_tables`
   says their fields in perfkit's words. `planner_statistics` finds what TorchRec's planner prints,
   of which `printed_plans` makes tables and a plan (`read_plan`); `plans` finds a plan in each form.
5. `kernel_database`: `read_gemms`, `read_collectives` and others give frames of measured kernels.
6. `training_logs`: `read_training_log` gives a `TrainingLog`, the time of an iteration with what a log
   states of its run. `training_lines` finds the lines of steps of each software, `training_facts`
   its arguments, and `training_models` says what they mean; `measured_steps` has the record of a
   measured step, `measured_jitter` how much the time of a rank varies, and `log_text` opens files.
"""
