# SPDX-License-Identifier: Apache-2.0
"""The ``kvhandoff`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

try:
    import rich as _rich  # noqa: F401
    import typer
except ImportError as error:
    raise SystemExit(
        f"the kvhandoff command needs typer and rich ({error}): pip install 'kvhandoff[cli]'"
    ) from None

from kvhandoff.cli.explain import explain
from kvhandoff.errors import KVHandoffError
from kvhandoff.protocol.trust import KEY_VARIABLE, Trust

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="KV cache handoff between vLLM prefill and decode engines.",
)


@app.callback()
def _root() -> None:
    """Kept so that a single command is still called by name."""


app.command("explain")(explain)


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="smollm2 (real weights), mla, qwen3, or several with commas")
    ] = "smollm2",
    report: Annotated[Path, typer.Option(help="where to write the report")] = Path(
        "demo-report.json"
    ),
    workspace: Annotated[Path, typer.Option(help="where made models are kept")] = Path(
        ".cache/models"
    ),
    key: Annotated[bool, typer.Option(help="protect the control channel by a shared key")] = True,
) -> None:
    """Run a prefill engine with PCP 2, a decode engine and vllm-router on this CPU machine."""
    from rich.console import Console

    from kvhandoff.cli.demo import run_demo

    console = Console()
    names = model.split(",")
    ok = True
    for name in names:
        path = report if len(names) == 1 else report.with_stem(f"{report.stem}-{name}")
        try:
            ok = run_demo(name, path, workspace, console, keyed=key) and ok
        except KVHandoffError as error:
            console.print(f"[bold red]{type(error).__name__}:[/] {error}", highlight=False)
            ok = False
    raise typer.Exit(0 if ok else 1)


@app.command()
def status(
    endpoint: Annotated[str, typer.Argument(help="HOST:PORT of a prefill engine's desk")],
    shared_key: Annotated[
        str,
        typer.Option(envvar=KEY_VARIABLE, help="The engine's shared_key, if it has one."),
    ] = "",
) -> None:
    """Show what a prefill engine holds, and how its latest requests fared."""
    from rich.console import Console

    from kvhandoff.cli.status import fetch_status, parse_endpoint, show_status

    console = Console()
    try:
        show_status(fetch_status(parse_endpoint(endpoint), key=Trust(shared_key).key), console)
    except KVHandoffError as error:
        console.print(f"[bold red]{type(error).__name__}:[/] {error}", highlight=False)
        raise typer.Exit(1) from None
