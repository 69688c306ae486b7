"""The instructors' tool: the students' edition, grading, reports. Not part of the edition."""
