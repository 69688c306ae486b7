"""Applications of a longer context: tasks whose scores rise with it.

windows        how well a passage is predicted, by how much of the text before it is seen
facts, words   records and dialogues of any length, with facts to be found again
recall         a small model that has learned to find them
recall_scores  how well it answers, by window, and where it looks
positions      how well each part of a text is predicted, with other rotary frequencies
"""
