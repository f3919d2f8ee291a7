"""`beamq doctor`: what this machine offers, as JSON or as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from beamq.commands import outcome
from beamq.commands.options import AsJson, Debug

if TYPE_CHECKING:
    from beamq.console import Screen


def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """What this machine offers and what is missing."""

    def body(screen: Screen) -> None:
        from beamq.views.doctor import doctor_blocks, doctor_data

        data = doctor_data()
        screen.show(lambda: data, lambda: doctor_blocks(data))

    raise typer.Exit(outcome.run(body, as_json=as_json, debug=debug))
