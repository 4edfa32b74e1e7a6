"""Where to store embedding tables: a placement problem, a lower bound of it, and the search for a
good placement.

Main types: `ShardingResult` (a plan, its price and the bound), `Problem` (units of tables are its
variables, placements their values, the time of an iteration the objective).

Reading order: `planner` (`shard` and `price_plan`, the table of contents), `setup` (from a workload
and a platform to a problem), `costs` (what one shard costs in each kind of placement), `problem`,
`candidates` and `constraints`, `bound` (Lagrangian relaxation), `search` (greedy starts and simulated
annealing), `result`; `judging` (`judge_plan`: a plan beside what is found and what is possible).
"""
