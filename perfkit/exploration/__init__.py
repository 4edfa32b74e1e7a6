"""Many predictions: sweeps over sizes, scaling over ranks, searches over strategies, and what has
to change to reach a target.

Main types: `Sweep` (a frame of predictions), `Exploration` (strategies or plans, best first).

Reading order: `sweeps` (a grid of configurations, priced together where they differ in sizes
alone), `decisions` (`scaling`, `solve_for`, `allocate`), `strategies` (`explore`).
"""
