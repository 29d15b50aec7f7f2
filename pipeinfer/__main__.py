"""`python -m pipeinfer`."""

from pipeinfer.cli import main

main(prog_name="pipeinfer")
