"""Names of devices: what a user may write for one, and the full name of the one that is there.

Goes in: a string, an id or a device as ``tf.config`` lists them.  Comes out: a full device name, or
an error that names the argument, what was given and which devices there are.
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
    """``value`` as an int, for ints, NumPy ints and whole floats (R has no other numbers).

    Raises:
      TypeError: it is a bool, a fraction or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refused.wrong_type(argument, value, "a whole number")
    if isinstance(value, numbers.Integral):
        return int(value)
    if not float(value).is_integer():
        raise TypeError(f"{argument} must be a whole number, but got {value!r}.")
    return int(float(value))


def short_name(device: str) -> str:
    """``CPU:1`` for ``/job:localhost/replica:0/task:0/device:CPU:1``."""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def kind_of(device: str) -> str:
    """``CPU`` or ``GPU``."""
    return str(tf.DeviceSpec.from_string(device).device_type)


def short_names(devices: Iterable[str]) -> str:
    """``CPU:1, CPU:2``."""
    return ", ".join(map(short_name, devices))


def gpu_count() -> int:
    """How many logical GPUs there are."""
    return len(tf.config.list_logical_devices("GPU"))


def is_listed(value: Any) -> bool:
    """Whether ``value`` is a device as ``tf.config`` lists them."""
    return isinstance(value, (tf.config.LogicalDevice, tf.config.PhysicalDevice))


def name_of_listed(device: Any, argument: str) -> str:
    """The name of a logical device, or of the only one that a physical device has."""
    if isinstance(device, tf.config.LogicalDevice):
        return device.name
    kind, first = device.device_type, 0
    for visible in tf.config.get_visible_devices(kind):
        count = len(tf.config.get_logical_device_configuration(visible) or [None])
        if visible != device:
            first += count
            continue
        if count == 1:
            return f"{kind}:{first}"
        joint = "and" if count == 2 else "to"
        raise ValueError(f"{argument} has {device!r}, which is {count} logical devices, "
                         f"{kind}:{first} {joint} {kind}:{first + count - 1}: name one of these. "
                         f"{devices_here()}")
    raise ValueError(f"{argument} has {device!r}, which is not visible to TensorFlow (see "
                     f"tf.config.set_visible_devices). {devices_here()}")


def tower_name(item: Any, argument: str = "devices") -> str:
    """The full name of a tower's device: a string, a GPU id or a listed device."""
    if isinstance(item, str):
        return full_name(item, argument)
    if is_listed(item):
        return full_name(name_of_listed(item, argument), argument, given=item)
    try:
        index = whole_number(argument, item)
    except TypeError:
        raise TypeError(f"{argument} has an item {refused.shown(item)} of type "
                        f"{type(item).__name__}. A list holds GPU ids or device strings. "
                        f"{devices_here()}") from None
    return full_name(f"GPU:{index}", argument, given=item)


def full_name(name: str, argument: str, given: Any = None) -> str:
    """The full name of a device that exists."""
    given = name if given is None else given
    text = name if name.startswith("/") else f"/{name}"
    try:
        spec = tf.DeviceSpec.from_string(text)
    except ValueError:
        spec = tf.DeviceSpec()
    if spec.device_type is None or "*" in text:
        raise ValueError(f'{argument} has {given!r}, which is no device string such as "GPU:0" or '
                         f'"/device:CPU:1". {_choices(argument)}{devices_here()}{_hint(argument)}')
    kind, index = spec.device_type.upper(), spec.device_index or 0
    wanted = spec.replace(device_type=kind, device_index=index)
    if spec.job in (None, "localhost") and not spec.replica and not spec.task:
        wanted = tf.DeviceSpec(device_type=kind, device_index=index)
    for device in tf.config.list_logical_devices(kind):
        local = _HERE.make_merged_spec(tf.DeviceSpec.from_string(device.name))
        if local.make_merged_spec(wanted) == local:
            return local.to_string()
    place_word = "on another machine" if wanted.job or wanted.task else "not there"
    raise ValueError(f"{argument} names {given!r} ({kind}:{index}), which is {place_word}. "
                     f"{_choices(argument)}{devices_here()}{_hint(argument)}")


def _choices(argument: str) -> str:
    if argument != "merge_device":
        return ""
    return f'merge_device must be None, "cpu", "{BALANCED}" or a device string. '


def _hint(argument: str) -> str:
    """How to get towers where there is no GPU."""
    if argument == "merge_device" or gpu_count():
        return ""
    return (" There is no GPU: split_cpu(n), called first of all, makes n logical CPU devices, "
            "which can be towers.")


def devices_here() -> str:
    """The devices that there are, in words."""
    names = [short_name(device.name) for device in tf.config.list_logical_devices()
             if device.device_type in ("CPU", "GPU")]
    return f"The devices here: {', '.join(names)}."
