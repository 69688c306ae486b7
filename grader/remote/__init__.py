"""Calls of a student's functions: computed in the sandbox, judged in the grader.

values    values as bytes and back; nothing in the bytes executes
kernel    in the sandbox: runs the cells
worker    in the sandbox: answers calls
refuse    in the sandbox: no fused attention
programs  in the sandbox: no other program
session   in the grader: functions that stand for the student's
evaluate  one check cell, run in the grader on such functions
memory    memory of the sandbox during a call, seen from outside
"""
