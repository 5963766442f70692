# SPDX-License-Identifier: Apache-2.0
"""Who reads from whom as a picture: a few lines of text, or SVG written by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from kvhandoff.cli.whatif import Explanation
from kvhandoff.model.shapes import stage_sizes
from kvhandoff.model.topology import Coordinate, ParallelSizes, TokenStripe, heads_of

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#4d4d4d")
_MAX_ALTERNATIVES = 400
_WIDTH, _HEIGHT, _GAP, _STAGE_GAP, _REPLICA_GAP, _MARGIN = 92, 64, 8, 22, 34, 28
_PREFILL_TOP, _DECODE_TOP = 96, 330


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2,5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def stripe_text(stripe: TokenStripe) -> str:
    """A token stripe: ``1/4 x16`` has every fourth run of 16 tokens, beginning with run 1."""
    if stripe.count == 1:
        return "all"
    return f"{stripe.index}/{stripe.count} x{stripe.interleave}"


def place_text(at: Coordinate, sizes: ParallelSizes) -> str:
    """A coordinate, without the axes that the engine does not have."""
    axes = [("pp", at.pp, sizes.pp), ("pcp", at.pcp, sizes.pcp), ("tp", at.tp, sizes.tp)]
    shown = [f"{name}{rank}" for name, rank, size in axes if size > 1]
    return " ".join(shown) or "tp0"


def text_picture(found: Explanation) -> list[str]:
    """Prefill workers as cells by replica; each names the decode workers that read it.

    ``.`` is an equivalent holder that this request does not read.
    """
    sizes, own = found.prefill.sizes, found.decode.sizes
    cells: dict[Coordinate, str] = {}
    for at in sizes.coordinates():
        readers = {own.rank(read.reader) for read in found.reads if at in read.sources}
        spare = any(at in read.holders for read in found.reads)
        cells[at] = f"D{ranges(readers)}" if readers else "." if spare else "-"
    width = max(4, *(len(cell) for cell in cells.values()))
    span = sizes.tp * (width + 1) + 1
    names = [f"pcp {pcp}" for pcp in range(sizes.pcp)]
    lines = ["P        " + "  ".join(name.ljust(span) for name in names).rstrip()]
    for pp in range(sizes.pp):
        groups = [
            "|" + " ".join(cells[Coordinate(pp, pcp, tp)].center(width) for tp in range(sizes.tp))
            for pcp in range(sizes.pcp)
        ]
        lines.append(f"  pp {pp:<3} " + "|  ".join(group.ljust(span - 1) for group in groups) + "|")
    lines.append("D")
    for pp in range(own.pp):
        ranks = [own.rank(Coordinate(pp, 0, tp)) for tp in range(own.tp)]
        lines.append(f"  pp {pp:<3} |" + " ".join(f"D{r}".center(width) for r in ranks) + "|")
    lines.append("Dn: read by decode worker n   .: holds the same, not read   -: not needed")
    return lines


def svg_picture(found: Explanation) -> str:
    """An SVG document: prefill workers on top, decode workers below, a line for each read."""
    top = _row(found.prefill.sizes, _MARGIN)
    bottom = _row(found.decode.sizes, _MARGIN)
    width = max(_right(top), _right(bottom), 760) + _MARGIN
    top = _centred(top, width)
    bottom = _centred(bottom, width)
    height = _DECODE_TOP + _HEIGHT + 96
    title = (
        f"prefill {_sizes_text(found.prefill.sizes)} to decode {_sizes_text(found.decode.sizes)}"
    )
    body = [
        _text(_MARGIN, 34, title, "title"),
        _text(_MARGIN, 54, _subtitle(found), "small"),
        *_panels(top, found.prefill.sizes),
        *_lines(found, top, bottom),
        *_boxes(found, top, bottom),
        *_legend(height),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            _STYLE,
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *body,
            "</svg>",
            "",
        ]
    )


_STYLE = """<style>
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1f2933; }
.title { font-size: 17px; font-weight: 600; } .small { font-size: 12px; fill: #52606d; }
.name { font-size: 12px; font-weight: 600; text-anchor: middle; }
.fact { font-size: 10.5px; fill: #52606d; text-anchor: middle; }
.panel { fill: #f5f7fa; stroke: #cbd2d9; } .stage { font-size: 11px; fill: #7b8794; }
.box { fill: #ffffff; stroke: #9aa5b1; stroke-width: 1.2; }
.read { fill: none; stroke-width: 2.4; stroke-linecap: round; }
.spare { fill: none; stroke: #9aa5b1; stroke-width: 0.8; stroke-dasharray: 3 4; opacity: 0.7; }
</style>"""


def _row(sizes: ParallelSizes, left: int) -> dict[Coordinate, int]:
    """Left edges of the boxes: replicas beside each other, in each the stages, in each TP."""
    places = {}
    for pcp in range(sizes.pcp):
        for pp in range(sizes.pp):
            for tp in range(sizes.tp):
                places[Coordinate(pp, pcp, tp)] = left
                left += _WIDTH + _GAP
            left += _STAGE_GAP - _GAP
        left += _REPLICA_GAP - _STAGE_GAP
    return places


def _right(places: dict[Coordinate, int]) -> int:
    return max(places.values()) + _WIDTH


def _centred(places: dict[Coordinate, int], width: int) -> dict[Coordinate, int]:
    shift = (width - _MARGIN - _right(places)) // 2
    return {at: x + shift for at, x in places.items()}


def _panels(top: dict[Coordinate, int], sizes: ParallelSizes) -> list[str]:
    drawn = []
    for pcp in range(sizes.pcp):
        edges = [x for at, x in top.items() if at.pcp == pcp]
        left, width = min(edges) - 12, max(edges) - min(edges) + _WIDTH + 24
        drawn.append(
            f'<rect class="panel" x="{left}" y="{_PREFILL_TOP - 26}" width="{width}" '
            f'height="{_HEIGHT + 38}" rx="8"/>'
        )
        drawn.append(_text(left + 12, _PREFILL_TOP - 9, f"prefill, PCP rank {pcp}", "stage"))
    return drawn


def _lines(
    found: Explanation, top: dict[Coordinate, int], bottom: dict[Coordinate, int]
) -> list[str]:
    """Dashed lines from middle to middle; on these the lines of reads, spread over the edges."""
    pairs = {(source, read.reader) for read in found.reads for source in read.sources}
    chosen = sorted(pairs, key=lambda pair: top[pair[0]])
    readers: dict[Coordinate, list[Coordinate]] = defaultdict(list)
    sources: dict[Coordinate, list[Coordinate]] = defaultdict(list)
    for source, reader in chosen:
        sources[reader].append(source)
        readers[source].append(reader)
    spare = {(holder, read.reader) for read in found.reads for holder in read.holders}
    spare -= set(chosen)
    drawn = []
    if len(spare) <= _MAX_ALTERNATIVES:
        for holder, reader in sorted(spare):
            ends = top[holder] + _WIDTH // 2, bottom[reader] + _WIDTH // 2
            drawn.append(_curve('class="spare"', *ends))
    for source, reader in chosen:
        beside = sorted(readers[source], key=bottom.__getitem__)
        ends = (
            _anchor(top[source], reader, beside),
            _anchor(bottom[reader], source, sources[reader]),
        )
        drawn.append(_curve(f'class="read" stroke="{_colour(found, reader)}"', *ends))
    return drawn


def _anchor(left: int, other: Coordinate, others: Sequence[Coordinate]) -> int:
    """Where on a box's edge the line to ``other`` ends."""
    return left + _WIDTH * (others.index(other) + 1) // (len(others) + 1)


def _curve(look: str, x1: int, x2: int) -> str:
    y1, y2 = _PREFILL_TOP + _HEIGHT, _DECODE_TOP
    middle = (y1 + y2) // 2
    return f'<path {look} d="M{x1} {y1} C{x1} {middle} {x2} {middle} {x2} {y2}"/>'


def _boxes(
    found: Explanation, top: dict[Coordinate, int], bottom: dict[Coordinate, int]
) -> list[str]:
    sources = {source for read in found.reads for source in read.sources}
    drawn = []
    for engine, places, y in (
        (found.prefill, top, _PREFILL_TOP),
        (found.decode, bottom, _DECODE_TOP),
    ):
        layers = _stages(found.model.layers, engine.sizes.pp, engine.cache.partition)
        for at, x in places.items():
            heads = heads_of(found.model.heads, engine.sizes.tp, at.tp)
            stripe = engine.sizes.stripe(at, engine.cache.interleave)
            facts = [
                f"layers {layers[at.pp]}",
                "latent" if found.model.mla else f"heads {ranges(range(heads.start, heads.stop))}",
            ]
            if stripe.count > 1:
                facts.append(f"tokens {stripe.index} of {stripe.count}")
            colour = _colour(found, at) if places is bottom else ""
            if at in sources and places is top:
                colour = "#1f2933"
            look = f' style="stroke:{colour};stroke-width:2.2"' if colour else ""
            drawn.append(
                f'<rect class="box" x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" '
                f'rx="6"{look}/>'
            )
            name = " ".join([f"pp{at.pp}"] * (engine.sizes.pp > 1) + [f"tp{at.tp}"])
            drawn.append(_text(x + _WIDTH // 2, y + 16, name, "name"))
            for line, fact in enumerate(facts):
                drawn.append(_text(x + _WIDTH // 2, y + 30 + 12 * line, fact, "fact"))
    left = min(bottom.values())
    drawn.append(_text(left, _DECODE_TOP + _HEIGHT + 18, "decode workers", "stage"))
    return drawn


def _stages(layers: int, pp: int, partition: Sequence[int]) -> list[str]:
    first, texts = 0, []
    for size in stage_sizes(layers, pp, partition):
        texts.append(ranges(range(first, first + size)))
        first += size
    return texts


def _legend(height: int) -> list[str]:
    y = height - 26
    line = f'<path class="{{}}" {{}} d="M{{}} {y - 4} h34"/>'
    return [
        line.format("read", f'stroke="{COLOURS[0]}"', _MARGIN),
        _text(_MARGIN + 42, y, "read for this request, one colour for each decode worker", "small"),
        line.format("spare", "", _MARGIN + 390),
        _text(_MARGIN + 432, y, "holds the same bytes: other requests, failover", "small"),
    ]


def _colour(found: Explanation, reader: Coordinate) -> str:
    return COLOURS[found.decode.sizes.rank(reader) % len(COLOURS)]


def _subtitle(found: Explanation) -> str:
    kind = "MLA" if found.model.mla else f"{found.model.heads} KV heads"
    return (
        f"{kind}, {found.model.layers} layers; request {found.prompt.request!r}, "
        f"{found.prompt.tokens} tokens, PCP replica {found.replica}, {found.nbytes:,} bytes"
    )


def _sizes_text(sizes: ParallelSizes) -> str:
    axes = [("TP", sizes.tp), ("PP", sizes.pp), ("PCP", sizes.pcp), ("DCP", sizes.dcp)]
    return " ".join(f"{name}{size}" for name, size in axes if size > 1) or "TP1"


def _text(x: int, y: int, content: str, look: str) -> str:
    return f'<text x="{x}" y="{y}" class="{look}">{escape(content)}</text>'
