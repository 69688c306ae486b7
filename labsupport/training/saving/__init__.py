"""How to hold less at a time, and how to make sure of it.

cross_entropy  the classifier and its loss, never with all the logits
chunks         a function of single tokens (the MLP), some tokens at a time
limit          a bound on memory that really holds, on a GPU and on a CPU
"""
