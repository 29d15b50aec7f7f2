"""`pipeinfer rebalance`: has a running server deal its layers out by what its stages take now."""

from __future__ import annotations

import json

import click

from pipeinfer.remote import Remote

DEFAULT_URL = "http://127.0.0.1:8080"


@click.command("rebalance")
@click.option("--url", default=DEFAULT_URL, show_default=True, help="The server.")
@click.option("--api-key", default="", envvar="PIPEINFER_API_KEY",
              help="Key for that server. PIPEINFER_API_KEY keeps it off the command line.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=300.0, show_default=True,
              help="Seconds to wait for it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rebalance_command(url: str, api_key: str, timeout: float, as_json: bool) -> None:
    """Deal a running server's layers out anew, by what each stage takes now.

    Requests that run go on: they are replayed over the new stages, with the same tokens.
    """
    found = Remote(url, api_key.split(",")[0], timeout).rebalance()
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(found["message"])
    for stage in found["stages"]:
        start, stop = stage["layers"]
        click.echo(f"stage {stage['node']}: layers {start}-{stop - 1} on rank {stage['rank']} "
                   f"({stage['host']})")
