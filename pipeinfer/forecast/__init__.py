"""What a cluster would do, computed before there is one: what `pipeinfer plan` prints.

Uses profiles and virtual time (`emulation`). Must not know the command line or start ranks.
"""
