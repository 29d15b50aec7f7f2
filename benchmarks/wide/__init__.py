"""Wide stages measured: one exchange of parts, whole grids, and what their slices change."""
