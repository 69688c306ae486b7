"""The instructors' tool: student and exam editions, grading, reports. Not part of an edition."""
