"""`pipeinfer chaos`: real jobs in which something goes wrong, and whether anybody lost a token."""
