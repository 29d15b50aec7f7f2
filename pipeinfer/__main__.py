"""`python -m pipeinfer`."""

from pipeinfer.cli.main import main

main(prog_name="pipeinfer")
