"""A draft for a target that somebody has: a thinned copy, taught by the target's own answers."""
