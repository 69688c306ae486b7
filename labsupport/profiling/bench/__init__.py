"""`labsupport bench`, `sweep` and `compare`: attention measured, judged and explained.

request    from options to cases
one        one case: its report
sweep      many cases: table and charts
compare    all implementations on one shape: the fastest, the leanest, and what to do next
bound      how far a time is from the least that this device could need
troubles   what to do where a case does not run, or runs abnormally slowly
export     tables as JSON and CSV
"""
