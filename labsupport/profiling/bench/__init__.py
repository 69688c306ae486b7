"""`labsupport bench`, `sweep` and `compare`: attention measured, judged and explained.

command    the three commands and their options; PyTorch comes when one runs
request    from options to cases
bench      one case: its report
sweep      many cases: table and charts
compare    all implementations on one shape: the fastest, the leanest, and what to do next
ceilings   how far a time is from the least that this device could need
troubles   what to do where a case does not run, or runs abnormally slowly
export     tables as JSON and CSV
agreement  this lab's clock beside triton.testing.do_bench and torch.utils.benchmark
"""
