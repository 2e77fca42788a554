"""What TensorFlow knows of a device and has no public name for."""

from __future__ import annotations

from tensorflow.python.client import device_lib
from tensorflow.python.eager import context as eager_context


def current_device() -> str:
    """The full name of the device of the ``tf.device`` around eager code; "" where there is none.

    No tensor is made to find out.
    """
    return eager_context.context().device_name or ""


def memory_limits() -> dict[int, int]:
    """Bytes that each logical GPU may use, by its index; tf.config has memory in use alone."""
    devices = device_lib.list_local_devices(eager_context.context().config)
    gpus = (device for device in devices if device.device_type == "GPU")
    return {int(device.name.rpartition(":")[2]): device.memory_limit for device in gpus}
