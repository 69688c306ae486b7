"""`labsupport profile`: one command that measures everything it can, and writes a folder.

The folder opens with SUMMARY.md, which is rewritten after every step: whatever ends the command
early (Control-C, a full disk, a backend that fails), what was gathered is there, and the summary
says what is missing and why.

report    SUMMARY.md: sections, what is missing, written whole or not at all
steps     what is done with a shape of attention: machine, baseline, comparison
steps_traces  and what its traces say
program   what is done with any program: `labsupport profile -- COMMAND`
program_plan  how it is run for that
wording   tables, verdicts and sentences of the summary
nsight    NVIDIA's profilers, when they are installed
counters  what their tables say, and what it means
one_call  the program that they look at
chart     memory during one call, backend by backend
"""
