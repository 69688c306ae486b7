"""The commands of the `labsupport` program, one file each; imports stay light until one runs."""
