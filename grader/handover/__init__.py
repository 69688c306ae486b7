"""Values between the student's kernel and the grader: how a check is judged without its code.

codec     values as bytes, and back, with nothing in them that executes
encoding  the kinds of values, and how one becomes a frame's header and bytes
wire      frames over a socket
worker    in the student's kernel: answers requests
remote    in the grader: functions that are computed over there
arrivals  what comes back becomes local: exceptions, gradients, views, changed arguments
watch     memory of a process and its children, seen from outside
outside   checks of memory, judged from outside the student's process
evaluate  one check cell, run in the grader
"""
