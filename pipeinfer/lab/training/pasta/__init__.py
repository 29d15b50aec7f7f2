"""PASTA's training: annotation, fine-tuning, preference rounds."""
