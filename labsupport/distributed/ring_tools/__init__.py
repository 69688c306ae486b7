"""`labsupport ring check` and `labsupport ring bench`: do several devices work, and how well?

start      the same function in every process, and what they agree on
cluster    which ranks there are, how they are linked, and how fast messages travel
check      ring attention against one device; findings, what comes of it
bench      ring attention timed: `measure_ring`
lab        one case of it: tried by each rank alone, agreed on, timed
cases      what is timed: a ring, PyTorch's context parallelism, one device
trouble    what went wrong, and what helps
"""
