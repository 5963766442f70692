# SPDX-License-Identifier: Apache-2.0
"""``kvhandoff explain``: which decode worker reads what from which prefill worker, and why not."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer

from kvhandoff.errors import KVHandoffError, UnsupportedSetup

if TYPE_CHECKING:
    from kvhandoff.cli.whatif import Engine, Explanation, PlannedRead
    from kvhandoff.model.shapes import ModelShape
    from kvhandoff.plan.pieces import Slicing

REFUSED = 2
"""Exit code where the pairing, or what was typed, is refused."""

_PCP_NOTE = "vLLM 0.32 itself runs prefill context parallelism for MLA models only"
_POLICY_NOTES = {
    "least-loaded": "least-loaded: a D that reads nothing else takes this replica, as with "
    "request; a busy one takes the replica that it reads the fewest tokens from",
    "stripe": "stripe: shares are those of equally fast holders; a slow one serves less",
}


@dataclass(frozen=True)
class _Question:
    """What was asked, parsed."""

    model: ModelShape
    prefill: Engine
    decode: Engine
    notes: list[str]


def explain(
    prefill: Annotated[str, typer.Option(help="Sizes of P, e.g. tp=4,pcp=2 (tp, pp, pcp, dcp).")],
    decode: Annotated[str, typer.Option(help="Sizes of D, e.g. tp=2; pp=2,partition=30:31.")],
    model: Annotated[
        str, typer.Option(help="gqa:heads=8,layers=4,head_size=128 or mla:layers=61,latent=576.")
    ] = "",
    model_config: Annotated[
        Path | None, typer.Option(help="A model's config.json, instead of --model.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 1000,
    hit: Annotated[int, typer.Option(help="Tokens that D has in its prefix cache.")] = 0,
    block_size: Annotated[int, typer.Option(min=1, help="--block-size of both engines.")] = 16,
    prefill_block_size: Annotated[int, typer.Option(min=0, help="That of P, if unequal.")] = 0,
    decode_block_size: Annotated[int, typer.Option(min=0, help="That of D, if unequal.")] = 0,
    prefill_layout: Annotated[str, typer.Option(help="Cache layout of P.")] = "LBHNC",
    decode_layout: Annotated[str, typer.Option(help="Cache layout of D.")] = "LBHNC",
    interleave: Annotated[
        int, typer.Option(min=1, help="--cp-kv-cache-interleave-size where DCP is above 1.")
    ] = 1,
    request: Annotated[str, typer.Option(help="P's id of the request.")] = "request-0",
    policy: Annotated[
        str, typer.Option(help="replica_policy of D: request, least-loaded or stripe.")
    ] = "request",
    stripe_min_bytes: Annotated[
        int, typer.Option(min=4096, help="stripe_min_bytes of D, for --policy stripe.")
    ] = 1 << 20,
    svg: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which decode worker would read what from which prefill worker.

    Needs no model, no GPU and no running engine. Exit code 2: this pairing is refused.
    """
    from kvhandoff.cli.whatif import Prompt, explain_pairing

    try:
        stripe = _slicing(policy, stripe_min_bytes)
        question = _question(
            (prefill, decode),
            (prefill_block_size or block_size, decode_block_size or block_size),
            (prefill_layout, decode_layout),
            interleave,
            _model(model, model_config),
        )
        found = explain_pairing(
            question.model, question.prefill, question.decode, Prompt(tokens, hit, request), stripe
        )
        question.notes.extend(note for name, note in _POLICY_NOTES.items() if name == policy)
        if svg is not None:
            from kvhandoff.cli.picture import svg_picture

            svg.write_text(svg_picture(found), encoding="utf-8")
    except (KVHandoffError, ValueError, OSError) as error:
        _refuse(str(error), as_json)
    if as_json:
        print(json.dumps(as_dict(found) | {"notes": question.notes}, indent=2))
    else:
        _show(found, question.notes)


def _slicing(policy: str, smallest: int) -> Slicing | None:
    """How reads are spread over holders; None if each has one."""
    from kvhandoff.plan.pieces import Slicing
    from kvhandoff.plan.replicas import Policy

    if policy not in get_args(Policy):
        raise UnsupportedSetup.because(
            "engines do not choose replicas like this",
            found=f"--policy {policy}",
            expected=", ".join(get_args(Policy)),
            change="use one of these, as for replica_policy",
        )
    return Slicing(smallest=smallest) if policy == "stripe" else None


def _model(text: str, config: Path | None) -> tuple[ModelShape, list[str]]:
    from kvhandoff.cli.spec import parse_model, read_model_config

    if bool(text) == (config is not None):
        raise ValueError("give one of --model and --model-config")
    return (parse_model(text), []) if config is None else read_model_config(config)


def _question(
    sizes: tuple[str, str],
    block_sizes: tuple[int, int],
    layouts: tuple[str, str],
    interleave: int,
    model: tuple[ModelShape, list[str]],
) -> _Question:
    from kvhandoff.cli.spec import parse_engine, parse_layout
    from kvhandoff.cli.whatif import Engine
    from kvhandoff.model.shapes import CacheShape

    engines: list[Engine] = []
    for text, block_size, layout in zip(sizes, block_sizes, layouts, strict=True):
        parallel, partition = parse_engine(text)
        cache = CacheShape(
            block_tokens=block_size,
            order=parse_layout(layout),
            interleave=interleave,
            partition=partition,
        )
        engines.append(Engine(parallel, cache))
    shape, notes = model
    if engines[0].sizes.pcp > 1 and not shape.mla:
        notes = [*notes, _PCP_NOTE]
    return _Question(shape, engines[0], engines[1], notes)


def _refuse(reason: str, as_json: bool) -> NoReturn:
    if as_json:
        print(json.dumps({"refused": reason}, indent=2))
    else:
        print(f"refused: {reason}", file=sys.stderr)
    raise typer.Exit(REFUSED)


def as_dict(found: Explanation) -> dict[str, Any]:
    """The explanation in plain types; a coordinate is ``{"pp", "pcp", "tp"}``."""
    names = found.model.names
    return {
        "prefill": _sizes(found.prefill),
        "decode": _sizes(found.decode),
        "request": found.prompt.request,
        "tokens": found.prompt.tokens,
        "hit": found.prompt.hit,
        "replicas": found.prefill.sizes.replicas,
        "replica": found.replica,
        "bytes": found.nbytes,
        "reads": [
            {
                "reader": read.reader._asdict(),
                "layers": [names[layer] for layer in read.layers],
                "heads": [read.heads.start, read.heads.stop],
                "stripe": _stripe(read, own=False),
                "own_stripe": _stripe(read, own=True),
                "equivalent_holders": len(read.holders),
                "holders": [holder._asdict() for holder in read.holders],
                "source": read.source._asdict(),
                "shares": [
                    {"holder": s.holder._asdict(), "bytes": s.nbytes, "pieces": s.pieces}
                    for s in read.shares
                ],
                "bytes": read.nbytes,
                "descriptors": {
                    "consecutive_blocks": read.descriptors[0],
                    "scattered_blocks": read.descriptors[1],
                },
            }
            for read in found.reads
        ],
    }


def _sizes(engine: Engine) -> dict[str, Any]:
    sizes = engine.sizes
    return {
        "tp": sizes.tp,
        "pp": sizes.pp,
        "pcp": sizes.pcp,
        "dcp": sizes.dcp,
        "block_size": engine.cache.block_tokens,
        "layout": f"{engine.cache.order}C",
    }


def _stripe(read: PlannedRead, *, own: bool) -> dict[str, int]:
    stripe = read.own_stripe if own else read.stripe
    return {"index": stripe.index, "count": stripe.count, "interleave": stripe.interleave}


def _show(found: Explanation, notes: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvhandoff.cli.picture import place_text, ranges, stripe_text, text_picture

    heads = "latent" if found.model.mla else "heads"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("D worker", "layers", heads, "tokens", "P worker", "holders"):
        table.add_column(title, overflow="fold")
    for title in ("bytes", "descriptors"):
        table.add_column(title, overflow="fold", justify="right")
    for read in found.reads:
        own = read.own_stripe
        meets = "" if own.count == 1 else f" & {stripe_text(own)}"
        few, many = read.descriptors
        table.add_row(
            f"D{found.decode.sizes.rank(read.reader)} "
            f"{place_text(read.reader, found.decode.sizes)}",
            ranges(read.layers),
            "all" if found.model.mla else ranges(range(read.heads.start, read.heads.stop)),
            stripe_text(read.stripe) + meets,
            _sources(read, found),
            str(len(read.holders)),
            f"{read.nbytes:,}",
            str(few) if few == many else f"{few}-{many}",
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(_headline(found), soft_wrap=True)
    console.print(table)
    print()
    print("\n".join(text_picture(found)))
    for note in notes:
        print(f"note: {note}")


def _sources(read: PlannedRead, found: Explanation) -> str:
    """The worker that is read; of several, each with its part of the bytes."""
    from kvhandoff.cli.picture import place_text

    sizes = found.prefill.sizes
    if len(read.shares) == 1:
        return place_text(read.source, sizes)
    return ", ".join(
        f"{place_text(share.holder, sizes)} {share.nbytes / read.nbytes:.0%}"
        for share in read.shares
    )


def _headline(found: Explanation) -> str:
    prompt, replicas = found.prompt, found.prefill.sizes.replicas
    hit = f", {prompt.hit} of them in D's prefix cache" if prompt.hit else ""
    return (
        f"P {found.prefill.sizes}  ->  D {found.decode.sizes}\n"
        f"request {prompt.request!r}: {prompt.tokens} tokens{hit}, PCP replica {found.replica} of "
        f"{replicas}, {found.nbytes:,} bytes; descriptors for consecutive-scattered blocks\n"
    )
