"""An EAGLE-3 head for a target: one layer that reads its hidden rows and proposes tokens."""
