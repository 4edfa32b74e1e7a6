"""Timing on real hardware: kernels, collectives, whole training iterations and the operations
inside them.

This room says what to time, times it, and holds the times as records; `perfkit.calibration` decides
how long to measure, and fits platforms to what comes back. On the machine that is measured it needs
PyTorch, NumPy and tqdm alone. In reading order:

- `records` and `gpu_records`: what comes back. `Timing` is the time of one thing, `MeasuredKernel`,
  `MeasuredCollective` and `MeasuredRank` say of what, and `MachineMeasurements` and
  `ClusterMeasurements` are all times of one machine, as plain JSON in files.
- `kernels`, `samples` and `probes`: what to time. A `Case` is one kernel with its sizes, a `Sample`
  one configuration of a model, a probe one question to a GPU.
- `timing`, `operations`, `iterations` and `cuda`: how it is timed. The tasks of measuring processes
  are ``time_...`` functions there; `processes` names those of a CPU, `time_probes` is that of a GPU.
- `processes` and `folders`: how tasks run, one process for each rank, and how a `Campaign` keeps
  finished measurements.
- `machine`: what the operating system says of the machine.
"""
