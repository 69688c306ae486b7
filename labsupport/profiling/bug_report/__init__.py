"""What a bug report needs, without anything private: `labsupport doctor --report FILE`.

report     the file, part by part
attention  the part that needs PyTorch, a program of its own
scrub      what is taken out: paths of the home directory, names, secrets
"""
