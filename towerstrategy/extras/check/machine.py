"""What is there: versions, devices, and how the devices reach each other.

Goes in: the process, before TensorFlow has started.  Comes out: facts for JSON, and the devices
that the towers are to be.
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
# MiB of each half where there is one GPU only: enough for the networks here.
_HALF_GPU = 2048

_COPIED_BYTES = 2**26
_COPIES = 4
_PATIENCE = 20  # seconds for another program


def prepare(count: int | None) -> tuple[list[str], bool]:
    """Makes the devices of ``count`` towers; None for every GPU, else :data:`CPU_TOWERS`.

    Comes out: these, and whether they share one physical device: a CPU, or the only GPU, in halves.
    ``ValueError`` or ``RuntimeError`` where there are fewer GPUs, or TensorFlow has started.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        # One more than towers: the merge device "cpu" is to be none of them, as with GPUs.
        return devices_lib.split_cpu(1 + (CPU_TOWERS if count is None else count))[1:], True
    if len(gpus) == 1 and count in (None, 2):
        half = tf.config.LogicalDeviceConfiguration(memory_limit=_HALF_GPU)
        tf.config.set_logical_device_configuration(gpus[0], [half, half])
        return ["GPU:0", "GPU:1"], True
    if count is not None and count > len(gpus):
        raise ValueError(f"--towers={count} asks for more towers than there are GPUs: {len(gpus)}.")
    return [f"GPU:{index}" for index in range(count or len(gpus))], False


def facts() -> dict[str, Any]:
    return {
        "towerstrategy": _version.__version__, "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := _version_of(name))},
        "keras_of_tf": f"{tf.keras.__name__} {tf.keras.__version__}",
        "built_with": {name: str(value) for name, value in tf.sysconfig.get_build_info().items()
                       if name in ("cuda_version", "cudnn_version", "is_cuda_build")},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name in (
            "CUDA_VISIBLE_DEVICES", "TF_CONFIG", "TF_USE_LEGACY_KERAS", "TF_ENABLE_ONEDNN_OPTS",
            "TF_GPU_ALLOCATOR", "TF_FORCE_GPU_ALLOW_GROWTH", "TF_DETERMINISTIC_OPS", "XLA_FLAGS")},
        "cores": len(os.sched_getaffinity(0)),
        "gpus": list(map(_described, tf.config.list_physical_devices("GPU"))),
        "driver": _nvidia_smi("--query-gpu=driver_version,memory.total", "--format=csv,noheader"),
        "topology": _nvidia_smi("topo", "-m"), "peer_access": _nvidia_smi("topo", "-p2p", "r")}


def copies(devices: Sequence[str]) -> list[dict[str, Any]]:
    """Measures how fast tensors go between GPUs and the CPU, one way at a time."""
    everyone = ["CPU:0", *devices]
    return [{"from": source, "to": target, "gb_per_s": _copy_rate(source, target)}
            for source in everyone for target in everyone if source != target]


def _copy_rate(source: str, target: str) -> float:
    with tf.device(source):
        # One value a copy: TensorFlow remembers where a value has been sent to.
        values = [tf.fill([_COPIED_BYTES // 4], float(number)) for number in range(_COPIES + 1)]
        for value in values:
            float(value[0])

    def arrive(value: tf.Tensor) -> None:
        with tf.device(target):
            float(tf.identity(value)[-1])

    arrive(values[0])
    start = time.perf_counter()
    for value in values[1:]:
        arrive(value)
    return _COPIES * _COPIED_BYTES / (time.perf_counter() - start) / 1e9


def _version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _described(gpu: Any) -> dict[str, str]:
    details = tf.config.experimental.get_device_details(gpu)
    return {"name": details.get("device_name", gpu.name),
            "compute_capability": ".".join(map(str, details.get("compute_capability") or ()))}


def _nvidia_smi(*arguments: str) -> str | None:
    """What ``nvidia-smi`` says; None where it is not there, or does not know."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True,
                              timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
