"""PASTA's training: annotation, layouts, preference."""
