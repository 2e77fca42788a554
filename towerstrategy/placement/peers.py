"""Which GPUs can access each other's memory (over NVLink or PCI Express), without the host.

Goes in: nothing; CUDA's driver is asked, as TensorFlow has no public function for it.  Comes out:
for each GPU, the numbers of the GPUs whose memory it can access.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

DRIVER = "libcuda.so.1"


@functools.cache
def reached() -> Mapping[int, frozenset[int]]:
    """For each logical GPU, the GPUs whose memory it can access; empty if unknown.

    It is unknown for GPUs of other makers, and if a physical GPU is several logical ones.
    """
    visible = tf.config.get_visible_devices("GPU")
    if len(tf.config.list_logical_devices("GPU")) != len(visible):
        return {}
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return {}
    return of_driver(driver, [int(device.name.rpartition(":")[2]) for device in visible])


def of_driver(driver: Any, numbers: Sequence[int]) -> Mapping[int, frozenset[int]]:
    """:func:`reached`, by CUDA's driver; ``numbers`` has CUDA's number of each logical GPU."""
    handles = [ctypes.c_int() for _ in numbers]
    failed = driver.cuInit(0) or any(driver.cuDeviceGet(ctypes.byref(handle), number)
                                     for handle, number in zip(handles, numbers))
    can_access, peers = ctypes.c_int(), {}
    for index, handle in enumerate(handles if not failed else ()):
        peers[index] = frozenset(
            other for other, peer in enumerate(handles) if other != index
            and not driver.cuDeviceCanAccessPeer(ctypes.byref(can_access), handle, peer)
            and can_access.value)
    return peers
