"""Machines: devices, networks and the fitted models that give times; files of them; what-if
changes.

Main types: `Machine` (all numbers), `Platform` (the same with what can be asked: `gemm`, `lookup`,
`collective`, `with_nodes` …), `Estimate` (a time with its interval and parts).

Reading order: `machine`, `platform`; `kernels` (which fit times a class), `kernel_times` (how it is
called) and `single_kernels`; `collectives`, `collective_costs`,
`collective_fits` and `spread_ranks`; `estimates`; `file`, `schema` and `gallery` (platform files), `datasheets` and `unmeasured` (without
measurements), `sources` (from logs and kernel databases), `whatif` (changes), `tables`.
"""
