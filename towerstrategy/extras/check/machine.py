"""Facts about the machine: versions, devices, and the rates of copies between devices.

Goes in: nothing; TensorFlow must not have started.  Comes out: facts for JSON, and the devices of
the towers.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _version
from towerstrategy.placement import devices as devices_lib

PACKAGES = ("tensorflow", "keras", "tf_keras", "numpy", "nvidia-cudnn-cu12", "nvidia-nccl-cu12")

CPU_TOWERS = 4
# MiB of each half if there is only one GPU: enough for the networks here.
_HALF_GPU = 2048

_COPIED_BYTES = 2**26
_COPIES = 4
_PATIENCE = 20  # seconds for nvidia-smi


def prepare(count: int | None) -> tuple[list[str], bool]:
    """The devices of ``count`` towers, and whether they are parts of one physical device.

    They are parts of a CPU, or halves of the only GPU.  By default there is a tower for each GPU,
    or there are :data:`CPU_TOWERS`.  Raises ``ValueError`` if there are fewer GPUs than towers,
    ``RuntimeError`` if TensorFlow has started.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        # One more device than towers: as with GPUs, the merge device "cpu" should be no tower.
        return devices_lib.split_cpu(1 + (CPU_TOWERS if count is None else count))[1:], True
    if len(gpus) == 1 and count in (None, 2):
        half = tf.config.LogicalDeviceConfiguration(memory_limit=_HALF_GPU)
        tf.config.set_logical_device_configuration(gpus[0], [half, half])
        return ["GPU:0", "GPU:1"], True
    if count is not None and count > len(gpus):
        raise ValueError(f"--towers={count} asks for more towers than there are GPUs: {len(gpus)}.")
    return [f"GPU:{index}" for index in range(count or len(gpus))], False


def facts() -> dict[str, Any]:
    """Versions, environment variables, and devices."""
    return {
        "towerstrategy": _version.__version__, "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version_of(name))},
        "keras_of_tf": f"{tf.keras.__name__} {tf.keras.__version__}",
        "built_with": {name: str(value) for name, value in tf.sysconfig.get_build_info().items()
                       if name in ("cuda_version", "cudnn_version", "is_cuda_build")},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name in (
            "CUDA_VISIBLE_DEVICES", "TF_CONFIG", "TF_USE_LEGACY_KERAS", "TF_ENABLE_ONEDNN_OPTS",
            "TF_GPU_ALLOCATOR", "TF_FORCE_GPU_ALLOW_GROWTH", "TF_DETERMINISTIC_OPS", "XLA_FLAGS")},
        "cores": len(os.sched_getaffinity(0)),
        "gpus": list(map(_gpu_facts, tf.config.list_physical_devices("GPU"))),
        "driver": _nvidia_smi("--query-gpu=driver_version,memory.total", "--format=csv,noheader"),
        "topology": _nvidia_smi("topo", "-m"), "peer_access": _nvidia_smi("topo", "-p2p", "r")}


def copies(devices: Sequence[str]) -> list[dict[str, Any]]:
    """Measures the rates of copies between GPUs and the CPU, one copy at a time."""
    all_devices = ["CPU:0", *devices]
    return [{"from": source, "to": target, "gb_per_s": _copy_rate(source, target)}
            for source in all_devices for target in all_devices if source != target]


def _copy_rate(source: str, target: str) -> float:
    with tf.device(source):
        # A new value for each copy, because TensorFlow keeps the copies of a value.
        values = [tf.fill([_COPIED_BYTES // 4], float(number)) for number in range(_COPIES + 1)]
        for value in values:
            float(value[0])

    def copy(value: tf.Tensor) -> None:
        with tf.device(target):
            float(tf.identity(value)[-1])

    copy(values[0])
    start = time.perf_counter()
    for value in values[1:]:
        copy(value)
    return _COPIES * _COPIED_BYTES / (time.perf_counter() - start) / 1e9


def _version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _gpu_facts(gpu: Any) -> dict[str, str]:
    details = tf.config.experimental.get_device_details(gpu)
    return {"name": details.get("device_name", gpu.name),
            "compute_capability": ".".join(map(str, details.get("compute_capability") or ()))}


def _nvidia_smi(*arguments: str) -> str | None:
    """The output of ``nvidia-smi``; None if it is not installed, or fails."""
    try:
        process = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True,
                                 timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
