"""The student edition of the notebooks, and students' working copies of it."""
