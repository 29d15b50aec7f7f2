"""Generated tasks, their answers in every method's language, and the embedded task model."""
