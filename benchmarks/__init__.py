"""Benchmarks: one file for each question about how right, or how fast, perfkit is.

``python -m benchmarks --list`` lists the questions with what each file needs, how long it takes, and
which claim of the documentation rests on it; ``helpers/catalogue.py`` holds this table. Each file can
be run alone: ``python -m benchmarks.checks zen3-2``.

To read them, begin with ``checks.py`` (saved runs become a table of errors), then ``gpu_products.py``
(predictions beside published times) and ``sharded.py`` (predicted first, then measured here).
``helpers/tables.py``, ``helpers/errors.py`` and ``helpers/command.py`` hold what all of them use; the
rest of ``helpers/`` belongs to single benchmarks. ``makers/`` answers no question: it makes the
platforms of the gallery and the pictures of docs/. ``__main__.py`` runs everything, for ``make bench``.
"""
