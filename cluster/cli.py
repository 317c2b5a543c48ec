"""The command line: ``paceline serve | generate | status | models | deploy | demo``."""

from __future__ import annotations

import importlib.metadata
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from paceline.actors.engine.errors import PacelineError
from paceline.cluster import cli_demo, cli_deploy, cli_generate, cli_models, cli_serve, cli_status
from paceline.cluster.cli_output import show_error

INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding on two pools: drafts propose, targets verify.",
    epilog="Start with: paceline demo",
)
app.command(epilog=cli_serve.EPILOG)(cli_serve.serve)
app.command(epilog=cli_generate.EPILOG)(cli_generate.generate)
app.command(epilog=cli_status.EPILOG)(cli_status.status)
app.add_typer(cli_models.app, name="models")
app.command(epilog=cli_deploy.EPILOG)(cli_deploy.deploy)
app.command(epilog=cli_demo.EPILOG)(cli_demo.demo)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"paceline {importlib.metadata.version('paceline')}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: errors on purpose are one sentence and exit status 1, an interrupt is 130."""
    # A terminated process stops what it started just as an interrupted one does.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(standalone_mode=True)
    except PacelineError as error:
        show_error(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
