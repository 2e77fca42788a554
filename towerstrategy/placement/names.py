"""Names of devices: from what users write to the full name of an existing device.

Goes in: a device string, a GPU id or a device from ``tf.config``.  Comes out: a full device name,
or an error with the argument's name, the value given and the existing devices.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from towerstrategy import refused

BALANCED = "balanced"
_HERE = tf.DeviceSpec(job="localhost", replica=0, task=0)


def whole_number(argument: str, value: Any) -> int:
    """``value`` as an int; accepts ints, NumPy ints and whole floats (R passes only floats)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refused.wrong_type(argument, value, "a whole number")
    if isinstance(value, numbers.Integral):
        return int(value)
    if not float(value).is_integer():
        raise TypeError(f"{argument} must be a whole number, but got {value!r}.")
    return int(float(value))


def count(argument: str, value: Any, most: int, what: str) -> int:
    """``value`` as an int from 1 to ``most``; ``what`` describes the argument, in words."""
    number = whole_number(argument, value)
    if not 1 <= number <= most:
        bound = "at least 1" if number < 1 else f"at most {most}"
        raise ValueError(f"{argument} must be {bound}, but got {number}: it is {what}.")
    return number


def short_name(device: str) -> str:
    """``CPU:1`` for ``/job:localhost/replica:0/task:0/device:CPU:1``."""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def kind_of(device: str) -> str:
    """The type of a device: ``CPU`` or ``GPU``."""
    return str(tf.DeviceSpec.from_string(device).device_type)


def short_names(devices: Iterable[str]) -> str:
    """``CPU:1, CPU:2``."""
    return ", ".join(map(short_name, devices))


def gpu_count() -> int:
    return len(tf.config.list_logical_devices("GPU"))


def is_listed(value: Any) -> bool:
    """Whether ``value`` is a logical or physical device from ``tf.config``."""
    return isinstance(value, (tf.config.LogicalDevice, tf.config.PhysicalDevice))


def tower_name(item: Any, argument: str = "devices") -> str:
    """The full name of a tower's device, given as a string, a GPU id or a device object."""
    name = item.name if is_listed(item) else item
    if not isinstance(name, str):
        try:
            name = f"GPU:{whole_number(argument, item)}"
        except TypeError:
            raise TypeError(f"{argument} has an item {refused.shown(item)} of type "
                            f"{type(item).__name__}. A list holds GPU ids or device strings. "
                            f"{devices_here()}") from None
    return full_name(name, argument, item)


def full_name(name: str, argument: str, value: Any) -> str:
    """The full name of the existing device ``name``; errors show the argument and its value."""
    text = name if name.startswith("/") else f"/{name}"
    try:
        spec = tf.DeviceSpec.from_string(text)
    except ValueError:
        spec = tf.DeviceSpec()
    if spec.device_type is None or "*" in text:
        raise ValueError(f'{argument} has {value!r}, which is no device string such as "GPU:0" or '
                         f'"/device:CPU:1". {_possible(argument)}')
    kind, index = spec.device_type.upper(), spec.device_index or 0
    wanted = spec.replace(device_type=kind, device_index=index)
    if spec.job in (None, "localhost") and not spec.replica and not spec.task:
        wanted = tf.DeviceSpec(device_type=kind, device_index=index)
    for device in tf.config.list_logical_devices(kind):
        if not device.name.endswith(f":{index}"):
            continue  # cheaper than parsing the name; many towers compare with many devices
        local = _HERE.make_merged_spec(tf.DeviceSpec.from_string(device.name))
        if local.make_merged_spec(wanted) == local:
            return local.to_string()
    where = "on another machine" if wanted.job or wanted.task else "not there"
    raise ValueError(f"{argument} names {value!r} ({kind}:{index}), which is {where}. "
                     f"{_possible(argument)}")


def _possible(argument: str) -> str:
    """The possible values of an argument, and how to make towers without a GPU."""
    if argument == "merge_device":
        return (f'merge_device must be None, "cpu", "{BALANCED}" or a device string. '
                f"{devices_here()}")
    return devices_here() + (
        "" if gpu_count() else " There is no GPU: split_cpu(n), called first of all, makes n "
        "logical CPU devices, which can be towers.")


def devices_here() -> str:
    """The existing devices, in words."""
    names = [short_name(device.name) for device in tf.config.list_logical_devices()
             if device.device_type in ("CPU", "GPU")]
    return f"The devices here: {', '.join(names)}."
