"""Tunes BiTA's masks and prompts on a frozen model."""
