"""Reports: points as CSV, a page for each student, the class at a glance."""
