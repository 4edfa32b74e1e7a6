"""Measurements to a platform, and predictions against measurements.

This room calibrates machines (measure, fit, write a platform), reads traces, and judges predictions.
`perfkit.measure` takes the times, `perfkit.fitting` fits the forms. In reading order:

- `campaign`: `calibrate` and `check`, the table of contents of all steps.
- Of a CPU: `cpu_plan` (`CpuPlan`), `cpu_measure`, `fit` (the steps of the fit, each in a file
  ``fit_...``), and `cpu_context` (what iterations add). `pace` relates times to the usual speed of
  the machine, `doctor` finds what would disturb it.
- Of GPUs: `cluster_plan`, `cluster_measure`, `cluster_fit` and `cluster_context`.
- From traces: `traces` (`Trace`), with `activity` (what each event does), `places`, `collectives`, `doubts`
  (what a trace lacks) and `step_graph` (its operations); `fit_traces` makes a platform of them.
- From one's own runs: `runs` (`Tuning`), scales of resources.
- Judging: `checks` (`Comparison`, predicted and measured), `study` (`Trials` of placements).
"""
