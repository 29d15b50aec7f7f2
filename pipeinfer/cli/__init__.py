"""The commands: options to settings, errors to exit codes, what a person reads in the terminal.

Must not decide anything that another front end would have to decide again.
"""
