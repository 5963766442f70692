# SPDX-License-Identifier: Apache-2.0
"""``kvhandoff explain`` tells what the planner does, and why a pairing is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="the extra `cli` is not installed")
pytest.importorskip("rich", reason="the extra `cli` is not installed")

from typer.testing import CliRunner

from kvhandoff.cli.main import app
from kvhandoff.cli.matrix import DECODE, PREFILL, refusal, render
from kvhandoff.cli.spec import parse_engine, parse_layout, parse_model, read_model_config
from kvhandoff.errors import UnsupportedSetup
from kvhandoff.model.rules import CONSUMER, require_role
from kvhandoff.model.shapes import ModelShape
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.plan.routing import replica_for_request

ROOT = Path(__file__).parents[2]
MLA = "mla:layers=61, latent=576"
GQA = "gqa:heads=8,layers=4,head_size=128"


def explain(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", *arguments])


def explained(prefill: str, decode: str, model: str, *more: str) -> dict[str, Any]:
    done = explain("--prefill", prefill, "--decode", decode, "--model", model, "--json", *more)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_mla_has_one_holder_for_each_pcp_and_tp_rank() -> None:
    found = explained("tp=4,pcp=2", "tp=2", MLA)
    assert [read["reader"] for read in found["reads"]] == [
        {"pp": 0, "pcp": 0, "tp": 0},
        {"pp": 0, "pcp": 0, "tp": 1},
    ]
    for read in found["reads"]:
        assert read["equivalent_holders"] == 8
        assert len({tuple(holder.values()) for holder in read["holders"]}) == 8
        assert read["source"] == read["holders"][0]
        assert read["bytes"] == 61 * 1000 * 576 * 2
    assert found["bytes"] == 2 * 61 * 1000 * 576 * 2


@pytest.mark.parametrize("request_id", ["a", "b", "c", "d"])
def test_the_replica_is_the_one_engines_choose(request_id: str) -> None:
    found = explained("tp=2,pcp=4", "tp=4,pp=2", MLA, "--request", request_id)
    assert found["replica"] == replica_for_request(request_id, 4)
    assert {read["source"]["pcp"] for read in found["reads"]} == {found["replica"]}


def test_heads_and_layers_are_read_from_who_holds_them() -> None:
    found = explained("tp=4,pp=2,partition=1:3", "tp=2", GQA)
    parts = [
        (read["reader"]["tp"], len(read["layers"]), read["heads"], read["source"]["tp"])
        for read in found["reads"]
    ]
    assert sorted(parts) == sorted(
        (tp, layers, [heads, heads + 2], heads // 2)
        for tp in (0, 1)
        for layers in (1, 3)
        for heads in (4 * tp, 4 * tp + 2)
    )


def test_a_prefix_hit_and_token_stripes_are_not_read() -> None:
    found = explained("tp=4,dcp=4", "tp=2,dcp=2", MLA, "--tokens", "128", "--hit", "64",
                      "--interleave", "16")  # fmt: skip
    assert found["bytes"] == 61 * 64 * 576 * 2
    assert {read["stripe"]["count"] for read in found["reads"]} == {4}
    assert {read["own_stripe"]["count"] for read in found["reads"]} == {2}


def test_scattered_blocks_need_more_descriptors() -> None:
    found = explained("tp=1", "tp=1", GQA, "--tokens", "160", "--block-size", "16")
    assert found["reads"][0]["descriptors"] == {"consecutive_blocks": 4, "scattered_blocks": 40}


def test_unequal_layouts_and_block_sizes() -> None:
    found = explained("tp=1", "tp=1", GQA, "--prefill-layout", "BLHNC", "--decode-layout", "NHD",
                      "--prefill-block-size", "32", "--decode-block-size", "16")  # fmt: skip
    assert (found["prefill"]["layout"], found["decode"]["layout"]) == ("BLHNC", "LBNHC")
    assert (found["prefill"]["block_size"], found["decode"]["block_size"]) == (32, 16)


def test_table_and_picture_are_printed() -> None:
    done = explain("--prefill", "tp=4,pcp=2", "--decode", "tp=2", "--model", MLA)
    assert done.exit_code == 0
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("D0", "D1"))]
    assert [row[:4] for row in rows] == [["D0", "tp0", "0-60", "all"], ["D1", "tp1", "0-60", "all"]]
    assert all("8" in row and "70,272,000" in row for row in rows)
    assert "pcp 0" in done.stdout
    assert "pcp 1" in done.stdout


STRIPED = ("--policy", "stripe", "--stripe-min-bytes", "4096")


@pytest.mark.parametrize(("prefill", "holders"), [("pcp=2", 2), ("pcp=4", 4), ("tp=2,pcp=2", 4)])
def test_striping_shows_every_holder_with_its_share(prefill: str, holders: int) -> None:
    """Shares add up to the bytes of the read; the first holder is the one of policy request."""
    found = explained(prefill, "tp=2", MLA, "--tokens", "4096", *STRIPED)
    plain = explained(prefill, "tp=2", MLA, "--tokens", "4096")
    assert found["bytes"] == plain["bytes"]
    for read, alone in zip(found["reads"], plain["reads"], strict=True):
        shares = read["shares"]
        assert [share["holder"] for share in shares] == read["holders"]
        assert len(shares) == holders
        assert sum(share["bytes"] for share in shares) == read["bytes"] == alone["bytes"]
        assert max(s["bytes"] for s in shares) < 1.5 * min(s["bytes"] for s in shares)
        assert alone["shares"] == [
            {"holder": alone["source"], "bytes": alone["bytes"], "pieces": 1}
        ]
        assert shares[0]["holder"] == alone["source"]


def test_short_reads_have_fewer_holders() -> None:
    """2 * 1000 tokens * 100 bytes are enough for three holders of 64 KiB."""
    found = explained("pcp=4", "tp=1", "mla:layers=2,latent=50", "--policy", "stripe",
                      "--stripe-min-bytes", "65536")  # fmt: skip
    (read,) = found["reads"]
    assert len(read["shares"]) == 3
    assert read["equivalent_holders"] == 4


def test_shares_are_printed_and_drawn(tmp_path: Path) -> None:
    """The table has a percentage for each, the pictures a mark."""
    file = tmp_path / "picture.svg"
    done = explain("--prefill", "pcp=2", "--decode", "tp=1", "--model", MLA, "--tokens", "4096",
                   "--svg", str(file), *STRIPED)  # fmt: skip
    assert done.exit_code == 0
    assert "pcp0 50%" in done.stdout
    assert "pcp1 50%" in done.stdout
    picture = next(line for line in done.stdout.splitlines() if line.startswith("  pp 0"))
    assert picture.count("D0") == 2
    assert "a slow one serves less" in done.stdout
    assert file.read_text(encoding="utf-8").count('class="read"') == 3  # one is the legend's


def test_least_loaded_is_request_with_a_note() -> None:
    """What else a consumer reads is not known here."""
    found = explained("tp=2,pcp=4", "tp=2", MLA, "--policy", "least-loaded")
    plain = explained("tp=2,pcp=4", "tp=2", MLA)
    (note,) = found.pop("notes")
    assert note.startswith("least-loaded: ")
    assert plain.pop("notes") == []
    assert found == plain


def test_gqa_with_pcp_comes_with_a_note() -> None:
    assert "MLA models only" in explained("tp=2,pcp=2", "tp=2", GQA)["notes"][0]


@pytest.mark.parametrize(
    ("prefill", "decode", "model"),
    [
        ("tp=4,pcp=2", "tp=2", MLA),
        ("tp=2,pp=2,pcp=2", "tp=8", GQA),
        ("tp=2,pcp=2,dcp=4", "tp=2,dcp=2,pp=2", MLA),
    ],
)
def test_svg_is_well_formed_and_complete(
    prefill: str, decode: str, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "picture.svg"
    found = explained(prefill, decode, model, "--svg", str(file), "--request", "<a&b>")
    root = ET.fromstring(file.read_text(encoding="utf-8"))
    tag = "{http://www.w3.org/2000/svg}"
    drawn = [element.get("class") for element in root.iter()]
    sizes = [parse_engine(text)[0] for text in (prefill, decode)]
    assert root.tag == f"{tag}svg"
    assert drawn.count("box") == sum(each.world_size for each in sizes)
    assert drawn.count("panel") == sizes[0].pcp
    lines = {(*read["source"].values(), *read["reader"].values()) for read in found["reads"]}
    assert drawn.count("read") == len(lines) + 1  # and the legend's
    assert any("<a&b>" in (element.text or "") for element in root.iter())


def test_decode_pcp_is_refused_in_the_words_of_an_engine() -> None:
    with pytest.raises(UnsupportedSetup) as refused:
        require_role(CONSUMER, ParallelSizes(tp=2, pcp=2))
    done = explain("--prefill", "tp=2", "--decode", "tp=2,pcp=2", "--model", MLA)
    assert done.exit_code == 2
    assert str(refused.value) in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tp=3", "tp=1", GQA), ("8 KV heads with tp=3", "prefill", "--tensor-parallel-size")),
        (("tp=2,dcp=2", "tp=1", GQA), ("dcp=2", "dcp=1", "--decode-context-parallel-size")),
        (("tp=4,dcp=3", "tp=1", MLA), ("dcp=3", "[1, 2, 4]", "--decode-context-parallel-size")),
        (("tp=1", "pp=99", MLA), ("pp=99", "61", "--pipeline-parallel-size")),
        (("tp=2,dcp=2", "tp=1", MLA, "--interleave", "5"), ("5", "16", "--block-size")),
        (("tp=4096,pcp=9", "tp=1", MLA), ("36864", "4096", "sizes")),
        (("tp=1", "tp=1", MLA, "--hit", "1000"), ("1000", "--hit")),
        (("tp=1", "tp=1", MLA, "--policy", "random"), ("random", "stripe", "replica_policy")),
        (("tp=x", "tp=1", MLA), ("tp is 'x'",)),
        (("tp=1,xp=2", "tp=1", MLA), ("'xp=2'", "dcp, partition, pcp, pp, tp")),
        (("tp=1", "tp=1", "gqa:layers=1"), ("lacks heads",)),
        (("tp=1", "tp=1", "rnn:layers=1"), ("'rnn'", "gqa or mla")),
        (("tp=1", "tp=1", MLA, "--prefill-layout", "CNHBL"), ("'CNHBL'", "LBHNC")),
        (("tp=1", "tp=1", MLA, "--model-config", "x.json"), ("one of --model and",)),
    ],
)
def test_refusals_end_with_code_2_and_say_why(
    arguments: tuple[str, ...], told: tuple[str, ...]
) -> None:
    prefill, decode, model, *more = arguments
    sizes = ("--prefill", prefill, "--decode", decode, "--model", model, *more)
    done = explain(*sizes)
    assert done.exit_code == 2
    assert done.stderr.startswith("refused: ")
    for words in told:
        assert words in done.stderr
    assert json.loads(explain(*sizes, "--json").stdout)["refused"] in done.stderr


@pytest.mark.parametrize(
    ("config", "shape", "notes"),
    [
        (
            {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "hidden_size": 1024, "torch_dtype": "bfloat16"},
            ModelShape(28, 8, 512, query_heads=16), 0,
        ),
        (
            {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "hidden_size": 576, "dtype": "float32"},
            ModelShape(30, 3, 512, query_heads=9), 0,
        ),
        (
            {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768},
            ModelShape(12, 12, 256, query_heads=12), 0,
        ),
        (
            {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
             "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 7168,
             "torch_dtype": "bfloat16", "index_topk": 2048},
            ModelShape(61, 1, 1152, mla=True), 1,
        ),
        (
            {"torch_dtype": "float16", "text_config": {
                "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 64, "layer_types": ["full_attention", "sliding_attention"] * 2}},
            ModelShape(4, 2, 256, query_heads=4), 1,
        ),
    ],
    ids=["qwen3", "smollm2", "mha", "deepseek", "nested"],
)  # fmt: skip
def test_a_models_configuration_is_read(
    config: dict[str, Any], shape: ModelShape, notes: int, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    found, remarks = read_model_config(file)
    assert found == shape
    assert len(remarks) == notes
    done = explain("--prefill", "tp=1", "--decode", "tp=1", "--model-config", str(file))
    assert done.exit_code == 0


@pytest.mark.parametrize(
    "text", ["[]", "{", "{}", '{"num_hidden_layers": "many"}', '{"text_config": 3}']
)
def test_a_broken_configuration_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    done = explain("--prefill", "tp=1", "--decode", "tp=1", "--model-config", str(file))
    assert done.exit_code == 2
    assert done.stderr.startswith("refused: ")


def test_specifications() -> None:
    assert parse_engine("tp=2, pp=2,partition=30:31") == (ParallelSizes(tp=2, pp=2), (30, 31))
    assert parse_engine("") == (ParallelSizes(), ())
    assert parse_model("mla:layers=2,latent=576,dtype=fp8") == ModelShape(2, 1, 576, mla=True)
    assert [parse_layout(name) for name in ("LBHNC", "lbnh", "HND")] == ["LBHN", "LBNH", "LBHN"]


def test_without_the_extra_one_sentence_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; import kvhandoff.cli.main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install 'kvhandoff[cli]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_support_matrix_is_up_to_date() -> None:
    """After a change of rules: ``python -m kvhandoff.cli.matrix > docs/support-matrix.md``."""
    committed = (ROOT / "docs" / "support-matrix.md").read_text(encoding="utf-8")
    assert committed == render()


@pytest.mark.parametrize("title", PREFILL)
def test_refusals_in_the_matrix_name_a_setting(title: str) -> None:
    model, rows = PREFILL[title]
    reasons = {refusal(model, row, column) for row in rows for column in DECODE} - {""}
    assert reasons
    for reason in reasons:
        assert all(word in reason for word in ("found ", "expected ", "--"))
