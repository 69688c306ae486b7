"""What a longer context is good for: tasks whose scores rise with it.

reading    a text that a model has read once, for any number of questions behind it
windows    how well a passage is predicted, by how much of the text before it is seen
planted    facts in a real document, and what finds them without a model
document   questions about them, with evidence that is checked
summary    a summary, judged by what can be counted, beside the document's first sentences
calls      the calls in a Python file, and simple guesses
code       which function is called here, by window
recall     a small model that has learned to find facts again: its training, and its weights
recall_recipe  what it was trained on, and how it began
recall_scores  how well it answers, by window, and where it looks
All but recall at full size: python -m benchmarks tasks
"""
