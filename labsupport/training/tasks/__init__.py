"""Applications of a longer context: tasks whose scores rise with it.

windows        how well a passage is predicted, by how much of the text before it is seen
recall         a small model that has learned to find facts in records and dialogues
recall_scores  how well it answers, by window, and where it looks
positions      how well each part of a text is predicted, with other rotary frequencies

Questions about a real document, calls in a real file, summaries: python -m benchmarks tasks, with
--documents on documents of your own.
"""
