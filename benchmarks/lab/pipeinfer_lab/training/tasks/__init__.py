"""Generated tasks, the tags of parallel answers, and training rows."""
