"""Units, validation, files and hardware facts: what every other room uses.

Functions and records here know nothing of kernels, collectives or models.

Reading order: `units` (how numbers are checked and shown), `hardware` (records of devices, links
and networks), `quantities` (sizes and times written with a unit), `records` (how frozen records set their fields), `files` (reference data, found in a
checkout and in a wheel), `targets` (files that are written whole), `results` (what tables and
charts of results share), `forms` (the mark of a closed form), `forks` (threads before a fork).
"""
