# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, foreign keys, and refusals that name the key."""

from __future__ import annotations

from typing import Any

import pytest

from kvhandoff.config import FOREIGN_KEYS, HandoffConfig, parse_config
from kvhandoff.errors import UnsupportedSetup


@pytest.mark.parametrize("extra", [None, {}, {key: {"tp_size": 2} for key in FOREIGN_KEYS}])
def test_nothing_said_means_defaults(extra: dict[str, Any] | None) -> None:
    """Keys that other connectors read are accepted and change nothing."""
    assert parse_config(extra) == HandoffConfig()


def test_settings_are_taken_over() -> None:
    """Whole numbers are fine where times are meant."""
    config = parse_config({"lease": 5, "pieces_in_flight": 128, "bind_host": "::", "prefill": {}})
    assert (config.lease, config.pieces_in_flight, config.bind_host) == (5.0, 128, "::")


@pytest.mark.parametrize("policy", ["request", "least-loaded", "stripe"])
def test_policies_are_known_by_name(policy: str) -> None:
    """All three, with the sizes that striping goes by."""
    config = parse_config(
        {"replica_policy": policy, "stripe_min_bytes": 4096, "slice_bytes": 1 << 40}
    )
    assert config.replica_policy == policy
    assert (config.stripe_min_bytes, config.slice_bytes) == (4096, 1 << 40)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lease", 0.0),
        ("lease", 86401),
        ("lease", float("nan")),
        ("lease", "30"),
        ("max_hold", 0),
        ("max_hold", float("inf")),
        ("pieces_in_flight", 0),
        ("pieces_in_flight", 65537),
        ("pieces_in_flight", 128.5),
        ("pieces_in_flight", True),
        ("replica_policy", "random"),
        ("replica_policy", "Stripe"),
        ("stripe_min_bytes", 4095),
        ("stripe_min_bytes", 65536.5),
        ("slice_bytes", 0),
        ("slice_bytes", (1 << 40) + 1),
        ("mooncake_protocol", None),
        ("handshake_timeout", -1),
        ("answer_timeout", []),
        ("shared_key", 7),
        ("shared_key", "k" * 1025),
        ("prefill_hosts", "10.0.0.1"),
        ("prefill_hosts", [7]),
    ],
)
def test_bad_values_are_refused_by_key(key: str, value: object) -> None:
    """The refusal names the key and where it stands."""
    with pytest.raises(UnsupportedSetup) as refusal:
        parse_config({key: value})
    assert "kv_connector_extra_config" in str(refusal.value)
    assert f"$.{key}" in str(refusal.value)


def test_misspelt_keys_are_refused_with_those_that_exist() -> None:
    """A setting that would do nothing is an error, and all real ones are listed."""
    with pytest.raises(UnsupportedSetup) as refusal:
        parse_config({"leese": 30})
    assert "`leese`" in str(refusal.value)
    for name in HandoffConfig.__struct_fields__:
        assert name in str(refusal.value)
