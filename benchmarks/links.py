"""The GPUs, hosts and links of simulated machines, with the source of each number.

Goes in: a :class:`Machine` of :data:`MACHINES`.  Comes out: the links that a tensor occupies
interconnect two devices, and their bandwidths.

A link transfers one tensor at a time, in the order of the requests, at its bandwidth.  A tensor
that crosses several links queues at each of them, and arrives when the last one has transferred it.
"""

from __future__ import annotations

import dataclasses

# GB/s in each direction, by the generation of PCI Express, x16: 15.75, 31.5 and 63 GB/s on the wire
# (PCI-SIG).  We estimate that a copy from pinned memory reaches 0.8 of this.
_PCIE = {3: 12.5, 4: 25.0, 5: 50.0}
# Seconds; our estimates, not measured.
LATENCY = 20e-6  # to start a copy, and until the host sees that it has ended (TensorFlow polls)
LAUNCH = {"GPU": 5e-6, "CPU": 3e-6}  # the least time of an operation on its device
EXECUTOR = 3e-6  # of the executor, to start an operation or to send a tensor
# To start a function that XLA has compiled: what explains ResNet-50's step on halves of an H200.
COMPILED = 300e-6


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
      tflops: the peak for float32 matrix products, in the format that TensorFlow uses for them.
      memory_bandwidth: GB/s of its memory.
      nvlink: GB/s in each direction over all its NVLinks; 0 without NVLink.
      pcie: the generation of its PCI Express.
      rows_per_second: images per second of ResNet-50 on one GPU, as published or measured.
      rows: the batch size of this measurement.
      xla: whether XLA compiled it.
    """

    tflops: float
    memory_bandwidth: float
    nvlink: float
    pcie: int
    rows_per_second: float
    rows: int
    xla: bool = True


# Peaks, memory and NVLink: NVIDIA's data sheets and white papers of P100, V100 (SXM2), A100 (SXM4
# 40GB; TF32) and H100 (SXM5; TF32 without sparsity). Images a second: P100, tensorflow.org's
# performance/benchmarks of 2017, batch 64, without XLA; V100 (float32) and A100 (TF32),
# NVIDIA/DeepLearningExamples, TensorFlow/Classification/ConvNets/resnet50v1.5, with XLA; H100
# (TF32), `python -m benchmarks one_gpu`, Keras 3 with XLA, see RESULTS.md, "On an H100".
GPUS = {
    "P100": Gpu(10.6, 732, 0, 3, 219, 64, xla=False),
    "V100": Gpu(15.7, 900, 150, 3, 412, 128),
    "A100": Gpu(156, 1555, 300, 4, 909, 256),
    "H100": Gpu(494, 3350, 450, 5, 2791, 256),
}

# For each V100 of a DGX-1, the number of NVLinks to other GPUs, as ``nvidia-smi topo -m`` shows it.
# Each GPU has six NVLinks, of 25 GB/s in each direction, to four GPUs; it reaches the other three
# through the host.
_DGX_1 = ({1: 1, 2: 1, 3: 2, 4: 2}, {0: 1, 2: 2, 3: 1, 5: 2}, {0: 1, 1: 2, 3: 2, 6: 1},
          {0: 2, 1: 1, 2: 2, 7: 1}, {0: 2, 5: 1, 6: 1, 7: 2}, {1: 2, 4: 1, 6: 2, 7: 1},
          {2: 1, 4: 1, 5: 2, 7: 2}, {3: 1, 4: 2, 5: 1, 6: 2})
_DGX_1_NVLINK = 25.0

# GB/s of the host's memory: 0.75 of the peak of two sockets, as STREAM reaches it: Xeon E5-2698 v4
# (DGX-1), EPYC 7742 (DGX A100), Xeon 8480C (DGX H100).
_HOST_BANDWIDTH = {"P100": 115, "V100": 115, "A100": 307, "H100": 460}
HOST_CORES, HOST_MHZ = 64, 2300


@dataclasses.dataclass(frozen=True)
class Machine:
    """A server with eight GPUs.

    Attributes:
      gpu: the kind of GPU, a name of :data:`GPUS`.
      interconnect: how two GPUs reach each other: ``"nvlink"`` (all at the full bandwidth, as
        through a switch), ``"cube"`` (by the NVLinks of a DGX-1; GPUs without one as with
        ``"host"``), ``"peer"`` (over PCI Express) or ``"host"`` (through the host's memory).
      gpus_per_switch: the number of GPUs that share one PCI Express link to the host.
    """

    gpu: str
    interconnect: str
    gpus_per_switch: int = 2

    @property
    def host_bandwidth(self) -> float:
        """GB/s of the host's memory."""
        return _HOST_BANDWIDTH[self.gpu]

    def route(self, source: str, target: str) -> dict[str, float]:
        """The links from ``source`` to ``target``: name -> GB/s."""
        gpu = GPUS[self.gpu]
        rate = _PCIE[gpu.pcie]
        if source[:3] == target[:3] == "GPU" and self.interconnect == "nvlink":
            return {f"{source} nvlink out": gpu.nvlink, f"{target} nvlink in": gpu.nvlink}
        nvlinks = self._nvlinks(source, target)
        if nvlinks:
            return {f"{source} nvlink to {target}": _DGX_1_NVLINK * nvlinks}
        switches = [self._switch(device) for device in (source, target)]
        links = {}
        if source != "CPU:0":
            links[f"{source} out"] = rate
        if target != "CPU:0":
            links[f"{target} in"] = rate
        if switches[0] != switches[1] or self.interconnect != "peer":
            if source != "CPU:0":
                links[f"{switches[0]} up"] = rate
            if target != "CPU:0":
                links[f"{switches[1]} down"] = rate
        return links

    def all_reduce_seconds(self, size: float, devices: int) -> float:
        """The time of an all-reduce of ``size`` bytes in a ring of ``devices``.

        It is a lower bound: 2 (R-1)/R of the bytes pass each link, at the full bandwidth and
        without latency.  Over PCI Express, a ring leaves and enters each switch only once.
        """
        if devices == 1:
            return 0.0
        gpu = GPUS[self.gpu]
        rate = gpu.nvlink or _PCIE[gpu.pcie]
        if self.interconnect in ("peer", "host"):
            rate = _PCIE[gpu.pcie]
        if self.interconnect == "host":
            rate /= min(self.gpus_per_switch, devices)  # all of them send over the shared link
        return 2 * (devices - 1) / devices * size / (rate * 1e9)

    def _nvlinks(self, source: str, target: str) -> int:
        """The number of NVLinks between two GPUs of a DGX-1."""
        if self.interconnect != "cube" or "CPU:0" in (source, target):
            return 0
        ends = [int(device.split(":")[1]) for device in (source, target)]
        return _DGX_1[ends[0]].get(ends[1], 0)

    def _switch(self, device: str) -> str:
        if device == "CPU:0":
            return "host"
        return f"switch {int(device.split(':')[1]) // self.gpus_per_switch}"


MACHINES = {
    "P100 PCIe 3": Machine("P100", "peer"),
    "V100 NVLink": Machine("V100", "cube"),
    "A100 PCIe 4, no peers": Machine("A100", "host"),
    "A100 PCIe 4, peers": Machine("A100", "peer"),
    "A100 NVLink": Machine("A100", "nvlink"),
    "H100 NVLink": Machine("H100", "nvlink"),
}
