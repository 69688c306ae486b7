"""Calls of a student's functions: computed in the sandbox, judged in the grader."""
