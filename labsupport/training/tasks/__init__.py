"""Applications of a longer context: tasks whose scores rise with it.

windows        how well a passage is predicted, by how much of the text before it is seen
document       questions about facts planted in a real document, with evidence that is checked
code           which function is called here, in a real file
summary        a summary, judged by what can be counted, beside the document's first sentences
recall         a small model that has learned to find facts in records and dialogues
recall_scores  how well it answers, by window, and where it looks

All but recall at full size: python -m benchmarks tasks
"""
