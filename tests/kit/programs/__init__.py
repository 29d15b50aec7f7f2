"""Programs that jobs run on every rank."""
