"""``kvlinker policies``: the linking policies and their parameters."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as GET /v1/policies answers it.")] = False,
) -> None:
    """List the linking policies: how each is written, what it does, and what its parameters may be."""
    from rich.console import Console
    from rich.table import Table

    from kvlinker import linking

    described = [policy.describe() for policy in linking.known_policies().values()]
    if as_json:
        typer.echo(json.dumps(described, indent=2, ensure_ascii=False))
        return
    table = Table("policy", "what it recomputes", "parameters", show_lines=True)
    for policy in described:
        parameters = "\n".join(f"{row['name']}: {_allowed(row)}" for row in policy["parameters"])
        table.add_row(policy["usage"].replace("[", "\\["), policy["description"], parameters)
    Console().print(table)
    typer.echo("Policies are joined with +, as in query-5+legolink-4: what any of them wants is recomputed.")


def _allowed(parameter: dict[str, object]) -> str:
    default = "" if parameter["default"] is None else f", {parameter['default']} by default"
    if parameter["type"] == "choice":
        values = parameter["values"]
        assert isinstance(values, list)
        return f"{' or '.join(values)}{default}"
    return f"{parameter['meaning']}, {parameter['minimum']:g} to {parameter['maximum']:g}{default}"
