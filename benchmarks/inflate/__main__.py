"""`python -m benchmarks.inflate`: see docs/models.md."""

from benchmarks.inflate.inflate import inflate_command

if __name__ == "__main__":
    inflate_command(prog_name="python -m benchmarks.inflate")
