"""Which GPUs reach each other's memory, over NVLink or PCI Express, without the host.

Goes in: nothing; CUDA's driver is asked, as TensorFlow says it of no public name.  Comes out: for
each GPU the numbers of those that it reaches.
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
    """For each of TensorFlow's GPUs those that it reaches; empty where that is not known.

    So it is with other makers' GPUs, and where several of TensorFlow's are one.
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
    """The same of GPUs of these numbers of CUDA's, which are TensorFlow's in this order."""
    handles = [ctypes.c_int() for _ in numbers]
    failed = driver.cuInit(0) or any(driver.cuDeviceGet(ctypes.byref(handle), number)
                                     for handle, number in zip(handles, numbers))
    can, found = ctypes.c_int(), {}
    for place, one in enumerate(handles if not failed else ()):
        found[place] = frozenset(
            number for number, other in enumerate(handles) if number != place
            and not driver.cuDeviceCanAccessPeer(ctypes.byref(can), one, other) and can.value)
    return found
