"""Helpers of benchmarks: nothing here answers a question or can be run alone.

`command` makes a command line, `tables` prints rows, `files` reads and writes tables, `errors` judges predictions, and
`saved_runs` predicts committed runs again. The others belong to one subject: `gpu_survey_points`, `gpu_survey_kernel` and
`gpu_survey_tables` to the survey of a GPU, `gpu_scales` to published steps of GPUs, `eager` and `overheads` to old loops of
PyTorch, `calculon` to `benchmarks.peers`, `beside_calls` to `benchmarks.beside`.
"""
