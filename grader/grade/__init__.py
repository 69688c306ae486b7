"""Grading: student notebooks in, points and diagnoses out."""
