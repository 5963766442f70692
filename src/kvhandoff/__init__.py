# SPDX-License-Identifier: Apache-2.0
"""KV cache handoff from vLLM prefill engines (P) to decode engines (D).

The life of one request, and the file in which each step is written:

1. **Announce** (P)   a prompt that D will continue is scheduled       vllm/scheduler.py
2. **Hold** (P)       prefill ended: P keeps the blocks, one *desk* per
                      engine keeps the books                           lifecycle/ledger.py
3. **Choose** (D)     one replica of P's KV, once per request          plan/routing.py
4. **Open** (D -> P)  D's workers ask the desk for the block ids       runtime/puller.py
5. **Plan** (D)       who reads which bytes from whom                  plan/
6. **Read** (D <- P)  one-sided reads of the transfer engine           transport/
7. **Complete**       the desk says whether P still held what was read lifecycle/ledger.py
8. **Free** (P)       every reader completed, or the lease ran out     runtime/desk.py

Importing this package needs neither vLLM, torch nor a transfer engine; what needs them
lives in ``kvhandoff.vllm`` and ``kvhandoff.transport.mooncake``.
"""

__version__ = "0.1.0"
