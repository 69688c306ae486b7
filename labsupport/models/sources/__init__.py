"""Where weights, vocabularies and text come from: a folder, the hub, a package registry.

catalog   the models that have a name here
packages  the packages that carry them, what is inside, and how they are fetched
build     from a package to a folder that can be opened
opening   a folder or a hub id, by Transformers
load      a model and its tokenizer, by name
text      long texts that every Python brings along
"""
