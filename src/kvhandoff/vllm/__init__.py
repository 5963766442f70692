# SPDX-License-Identifier: Apache-2.0
"""The adapter: the only folder that imports vLLM and torch.

``register`` is the ``vllm.general_plugins`` entry point; vLLM calls it in each of its processes.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

CONNECTORS = ("KVHandoffConnector", "MooncakeConnectorV1", "MooncakeHybridConnector")


def log_like_vllm() -> None:
    """Log through vLLM's handlers, at its level, unless somebody has set up this package's logs.

    Engine and worker processes set up vLLM's own logs before they load plugins.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvhandoff")
    if theirs.handlers and not ours.handlers and ours.level == logging.NOTSET:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def register() -> None:
    """Make the connectors known by name. Names that somebody else has registered are left alone;
    ``kv_connector_module_path`` = ``kvhandoff.vllm.connector`` chooses ours then."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    log_like_vllm()

    for name in CONNECTORS:
        try:
            KVConnectorFactory.register_connector(name, "kvhandoff.vllm.connector", name)
        except ValueError:
            logger.debug("a connector named %s is registered already", name)
