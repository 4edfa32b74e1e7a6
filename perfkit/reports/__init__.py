"""Reports: any results as one file that opens without a network.

`report` takes results (`perfkit.ground.results.Reported`): each has a title, a headline and sections,
and a section is a heading with a chart, a frame, rows of text or another result. Read `page` first:
`report` checks what it was given, fills ``page.html`` and writes the file. `parts` makes records of
results (`ShownResult`, with `TablePart` and `ChartPart`), which the page shows in their order.
`svg` writes the picture of a chart again, so that a name in it cannot become code; ``charts.js``
draws each chart again in the browser, so that the pointer shows values. A new section of a result
needs none of these: it is a ``yield`` in `sections` of its class.
"""
