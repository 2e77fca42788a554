"""GPUs, hosts and what connects them: every number that the simulation rests on, with its source.

Goes in: a :class:`Machine` of :data:`MACHINES`.  Comes out: which resources a tensor occupies on
its way from device to device, and for how long.

A link lets one tensor through at a time, in the order in which they are ready, at the link's rate.
A tensor that crosses several links queues at each, and is there when the last has let it through.
"""

from __future__ import annotations

import dataclasses

# Per way. PCI Express by generation, x16: 15.75, 31.5 and 63 GB/s on the wire (PCI-SIG). That a
# copy from pinned memory reaches 0.8 of it is our estimate.
_PCIE = {3: 12.5, 4: 25.0, 5: 50.0}
# From a copy's end to when the host has seen it (TensorFlow polls), with what it takes to start;
# the least that an operation takes on its device; what an executor needs to start one, or to send a
# tensor: our estimates, not measured.
LATENCY = 20e-6
LAUNCH = {"GPU": 5e-6, "CPU": 3e-6}
EXECUTOR = 3e-6


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
      tflops: its peak in the format that TensorFlow multiplies float32 in.
      memory: GB/s of its memory.
      nvlink: GB/s a way over all its NVLinks; 0 for none.
      pcie: the generation of its PCI Express.
      rows_per_second: images a second of ResNet-50 on one, as published or measured.
      rows: with so many rows.
      compiled: by XLA.
    """

    tflops: float
    memory: float
    nvlink: float
    pcie: int
    rows_per_second: float
    rows: int
    compiled: bool = True


# Peaks, memory and NVLink: NVIDIA's data sheets and white papers of P100, V100 (SXM2), A100 (SXM4
# 40GB; TF32) and H100 (SXM5; TF32 without sparsity). Images a second: P100, tensorflow.org's
# performance/benchmarks of 2017, batch 64, without XLA; V100 (float32) and A100 (TF32),
# NVIDIA/DeepLearningExamples, TensorFlow/Classification/ConvNets/resnet50v1.5, with XLA; H100
# (TF32), `python -m benchmarks one_gpu`, Keras 3 with XLA, see RESULTS.md, "On an H100".
GPUS = {
    "P100": Gpu(10.6, 732, 0, 3, 219, 64, compiled=False),
    "V100": Gpu(15.7, 900, 150, 3, 412, 128),
    "A100": Gpu(156, 1555, 300, 4, 909, 256),
    "H100": Gpu(494, 3350, 450, 5, 2791, 256),
}

# How many of its six NVLinks, 25 GB/s a way each, a V100 of a DGX-1 has to each other one, as
# ``nvidia-smi topo -m`` shows it; four of seven are reached, the others through the host.
_DGX_1 = ({1: 1, 2: 1, 3: 2, 4: 2}, {0: 1, 2: 2, 3: 1, 5: 2}, {0: 1, 1: 2, 3: 2, 6: 1},
          {0: 2, 1: 1, 2: 2, 7: 1}, {0: 2, 5: 1, 6: 1, 7: 2}, {1: 2, 4: 1, 6: 2, 7: 1},
          {2: 1, 4: 1, 5: 2, 7: 2}, {3: 1, 4: 2, 5: 1, 6: 2})
_DGX_1_NVLINK = 25.0

# GB/s of the host's memory: 0.75 (what STREAM reaches) of two sockets' peak: Xeon E5-2698 v4
# (DGX-1), EPYC 7742 (DGX A100), Xeon 8480C (DGX H100).
_HOST = {"P100": 115, "V100": 115, "A100": 307, "H100": 460}
HOST_CORES, HOST_MHZ = 64, 2300


@dataclasses.dataclass(frozen=True)
class Machine:
    """Eight GPUs in a server.

    Attributes:
      gpu: which, a name of :data:`GPUS`.
      between: how two GPUs reach each other: ``"nvlink"`` (all at the full rate, as through a
        switch), ``"cube"`` (those of a DGX-1 that a NVLink joins; the others as with ``"host"``),
        ``"peer"`` (over PCI Express) or ``"host"`` (through the host's memory).
      a_switch: how many GPUs share one PCI Express link to the host.
    """

    gpu: str
    between: str
    a_switch: int = 2

    @property
    def host_memory(self) -> float:
        """GB/s."""
        return _HOST[self.gpu]

    def way(self, source: str, target: str) -> dict[str, float]:
        """The links from device to device: name -> GB/s."""
        gpu = GPUS[self.gpu]
        rate = _PCIE[gpu.pcie]
        if source[:3] == target[:3] == "GPU" and self.between == "nvlink":
            return {f"{source} nvlink out": gpu.nvlink, f"{target} nvlink in": gpu.nvlink}
        joined = self._joined(source, target)
        if joined:
            return {f"{source} nvlink to {target}": _DGX_1_NVLINK * joined}
        switches = [self._switch(device) for device in (source, target)]
        links = {}
        if source != "CPU:0":
            links[f"{source} out"] = rate
        if target != "CPU:0":
            links[f"{target} in"] = rate
        if switches[0] != switches[1] or self.between != "peer":
            if source != "CPU:0":
                links[f"{switches[0]} up"] = rate
            if target != "CPU:0":
                links[f"{switches[1]} down"] = rate
        return links

    @property
    def reached(self) -> dict[int, frozenset[int]]:
        """The GPUs that each one reaches, where it reaches some; nothing where all, or none."""
        return {number: frozenset(joined) for number, joined in enumerate(_DGX_1)} \
            if self.between == "cube" else {}

    def ring(self, size: float, devices: int) -> float:
        """Seconds of an all-reduce of ``size`` bytes in a ring of ``devices``.

        2 (R-1)/R of the bytes pass each link, at the full rate and without a start: the least that
        it can be.  On PCI Express neighbours in other switches share the links up and down with
        nobody.
        """
        if devices == 1:
            return 0.0
        gpu = GPUS[self.gpu]
        rate = gpu.nvlink or _PCIE[gpu.pcie]
        if self.between in ("peer", "host"):
            rate = _PCIE[gpu.pcie]
        if self.between == "host":
            rate /= min(self.a_switch, devices)  # each GPU's bytes go up and down the shared link
        return 2 * (devices - 1) / devices * size / (rate * 1e9)

    def _joined(self, source: str, target: str) -> int:
        """How many NVLinks of a DGX-1 join two GPUs."""
        if self.between != "cube" or "CPU:0" in (source, target):
            return 0
        ends = [int(device.split(":")[1]) for device in (source, target)]
        return _DGX_1[ends[0]].get(ends[1], 0)

    def _switch(self, device: str) -> str:
        if device == "CPU:0":
            return "host"
        return f"switch {int(device.split(':')[1]) // self.a_switch}"


MACHINES = {
    "P100 PCIe 3": Machine("P100", "peer"),
    "V100 NVLink": Machine("V100", "cube"),
    "A100 PCIe 4, no peers": Machine("A100", "host"),
    "A100 PCIe 4, peers": Machine("A100", "peer"),
    "A100 NVLink": Machine("A100", "nvlink"),
    "H100 NVLink": Machine("H100", "nvlink"),
}
