# SPDX-License-Identifier: Apache-2.0
"""A process with readable memory, which can be stopped, continued and killed like a peer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from kvhandoff.model.layout import Segment

HOST = "127.0.0.1"


def _serve(path: str, size: int) -> None:
    from kvhandoff.transport.mooncake import MooncakeTransport

    memory = np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
    transport = MooncakeTransport(HOST, "tcp")
    transport.register(Segment(int(memory.ctypes.data), size))
    print(transport.session, int(memory.ctypes.data), flush=True)
    sys.stdin.readline()
    os._exit(0)


class Peer:
    """A TransferEngine in a process of its own.

    Its memory is shared with this process: as on a machine that computes on while its packets are
    held up, it can change while the process is stopped.
    """

    def __init__(self, size: int) -> None:
        handle, name = tempfile.mkstemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        os.truncate(handle, size)
        os.close(handle)
        self.memory = np.memmap(name, dtype=np.uint8, mode="r+", shape=(size,))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.peer", name, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.session, base = self._process.stdout.readline().split()
        self.base = int(base)
        os.unlink(name)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """No packet is answered any more, and none is refused."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
