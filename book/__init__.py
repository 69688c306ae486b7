"""The lab's web site, `make book`: the theory and the executed notebooks as pages, with Sphinx.

gather         copies chapters and notebooks to where Sphinx reads them, links as they are
notebook       what of a notebook becomes a page: hidden tests go, solutions are folded away
results        its HTML results, with tables that screen readers can tell apart
tables         the same for the tables of chapters
reading_order  which chapter belongs to which section, read from theory/README.md
crosslinks     boxes with those links, on both sides; the way into JupyterLab
glossary       terms that lead to the glossary, and show their meaning
reference      functions from docstrings, commands from the program; code on other pages leads there
figures        the figure to play with
assets         MathJax, fetched once; nothing else comes from outside, and nothing when it is read
conf           Sphinx's settings
"""
