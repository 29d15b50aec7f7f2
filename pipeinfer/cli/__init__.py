"""The commands: options to settings, errors to exit codes, and output in the terminal.

Must not make decisions that another front end would have to make as well.
"""
