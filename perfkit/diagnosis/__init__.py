"""A verdict on logs of nccl-tests: is this bandwidth normal, and if not, what is wrong?

`perfkit.diagnosis.diagnosis.diagnose` is the way in. Read first `records`, what the files pass to each
other; `expectations` says which system a run is of and what its links give, `verdicts` compares each
row and each range of sizes with that, `causes` looks for signatures of known faults, `result` is
what people see, and `texts` how it is said.
"""
