"""A process that uses up memory bandwidth and shared cache, as other programs on a device do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Four times 32 MiB goes through any cache; it ends by itself when the process that started it has ended.
_STREAM = """
import os
import numpy
parent = os.getppid()
data = numpy.zeros(2**25, numpy.float32)
print(flush=True)
while os.getppid() == parent:
    data += 1
"""


@contextmanager
def neighbour() -> Iterator[int]:
    """Stream memory in a process of its own; yields its process id."""
    process = subprocess.Popen([sys.executable, "-c", _STREAM], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        try:
            output.readline()
            yield process.pid
        finally:
            process.kill()
            process.wait()
