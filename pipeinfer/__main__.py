"""`python -m pipeinfer`, and the command `pipeinfer`."""

from pipeinfer.loading import uncollected

with uncollected():
    from pipeinfer.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    main(prog_name="pipeinfer")
