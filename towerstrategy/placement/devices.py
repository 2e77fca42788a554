"""The constructor's arguments -> the tower devices and the merge device.

Goes in: ``devices``, ``merge_device`` and ``shares`` as given to ``TowerStrategy``, and the logical
devices that TensorFlow lists.  Comes out: a :class:`Placement`, with full device names.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import glob
import importlib.util
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import refused, warned
from towerstrategy.placement import asked_shares, names

# TensorFlow itself has no limit: it makes logical devices until memory is exhausted.
_MOST_LOGICAL_CPUS = 1024
_MOST_MICRO_BATCHES = 1024  # each is a replica, which costs memory and time to trace


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of a strategy's towers, merging and variables."""

    towers: tuple[str, ...]  # full device names, one per replica: a tower's for each micro-batch
    # Merges results that belong to no variable; the home of all variables if not ``balanced``.
    merge: str
    balanced: bool  # whether each variable has its own home among the towers
    shares: tuple[float, ...] | None = None  # one number per replica; None: equal rows
    shares_from: str = ""  # the argument ``shares`` if it was "measured" or "memory"
    micro_batches: int = 1  # the number of parts into which a tower's rows are cut
    # If towers have *stages*: each tower's devices, stage by stage; ``towers`` has the first ones.
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def stages(self) -> int:
        return len(self.rows[0]) if self.rows else 1

    def row(self, replica: int) -> tuple[str, ...]:
        """The devices of a replica's stages."""
        return self.rows[replica // self.micro_batches] if self.rows else (self.towers[replica],)

    def stage_at(self, device: str) -> int | None:
        """The stage that some tower has on ``device``; None if there is no such stage."""
        return next((stage for row in self.rows for stage, name in enumerate(row)
                     if name == device), None)

    @property
    def devices(self) -> tuple[str, ...]:
        """Full device names, one per tower."""
        return self.towers[::self.micro_batches]

    def name(self, replica: int) -> str:
        """A replica's name in messages: ``tower 1``, or ``micro-batch 3 of tower 1``."""
        tower, number = divmod(replica, self.micro_batches)
        return f"micro-batch {number} of " * (self.micro_batches > 1) + f"tower {tower}"

    def note(self, replica: int, rows: str) -> str:
        """The note on an error that was raised in a replica; ``rows``: its rows in words."""
        none = (" Some operations fail without rows, such as TensorFlow's convolutions on the CPU: "
                "give each batch at least as many rows as there are towers.")
        return (f"This happened in {self.name(replica)} on {names.short_name(self.towers[replica])}"
                + (f", which has {rows}." if rows else ".") + none * rows.startswith("none"))

    @property
    def merge_note(self) -> str:
        """The note on an error that was raised in the function given to ``merge_call``."""
        return ("This happened at the sync point (merge_call), on the merge device "
                f"{names.short_name(self.merge)}.")

    @property
    def merge_name(self) -> str:
        """The merge device in messages: ``CPU:0``, ``balanced`` or ``each stage's``."""
        if self.rows:
            return "each stage's"
        return names.BALANCED if self.balanced else names.short_name(self.merge)

    @property
    def title(self) -> str:
        """The towers in messages: ``4 towers``, or ``1 tower of 4 stages and 2 micro-batches``."""
        number, micro = len(self.devices), self.micro_batches
        parts = [f"{self.stages} stages"] * bool(self.rows)
        parts += [f"{micro} micro-batches"] * (micro > 1)
        return f"{number} tower{'s' * (number > 1)}{' of ' * bool(parts)}{' and '.join(parts)}"

    def __str__(self) -> str:
        rows = ([f"[{names.short_names(row)}]" for row in self.rows]
                or list(map(names.short_name, self.devices)))
        shares = self.shares_from or ", ".join(
            f"{share:g}" for share in (self.shares or ())[::self.micro_batches])
        return (f"{self.title} ({', '.join(rows)}), merge device {self.merge_name}"
                + f", shares {shares}" * bool(shares))

    @property
    def compiles(self) -> bool:
        """Whether XLA can compile a whole step: all of it is on TensorFlow's default device."""
        # XLA orders the operations itself; it would not run micro-batches one after another.
        if self.micro_batches > 1 or self.rows:
            return False
        default = "GPU:0" if names.gpu_count() else "CPU:0"
        return {*self.towers, self.merge} == {names.tower_name(default)}

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """The types of the towers' devices; several only if ``shares`` is given."""
        return frozenset(map(names.kind_of, (*self.towers, *itertools.chain(*self.rows))))

    @property
    def towers_on_host(self) -> bool:
        """Whether the towers share the host's memory, so that they need no prefetching."""
        return self.kinds == {"CPU"}

    @functools.cached_property
    def on_cpu(self) -> bool:
        """Whether towers and merge device are all CPU devices, which share the same cores."""
        return self.kinds == {names.kind_of(self.merge)} == {"CPU"}


def split_cpu(count: int) -> list[str]:
    """Makes ``count`` logical CPU devices, for a machine with no GPU.

    Logical devices share the machine's cores; they let several towers run, and be tested, where
    there is one CPU.  Source: ``tf.config.set_logical_device_configuration``.

    Args:
      count: how many, from 1 to 1024.

    Returns:
      The device strings, ready for ``TowerStrategy``.

    Raises:
      RuntimeError: TensorFlow has started already, with another number of CPU devices.

    >>> split_cpu(4)
    ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']
    """
    count = names.count("count", count, _MOST_LOGICAL_CPUS,
                        "the number of logical CPU devices to make")
    cpus = tf.config.list_physical_devices("CPU")
    configurations = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    try:
        tf.config.set_logical_device_configuration(cpus[0], configurations)
    except RuntimeError as error:
        existing = len(tf.config.list_logical_devices("CPU"))
        if existing != count:
            raise RuntimeError(
                f"split_cpu(count={count}) came after TensorFlow had started with {existing} CPU "
                "device(s), and that number is fixed for the life of the process. Call split_cpu "
                "first thing after `import tensorflow`, before any tensor, variable, model or "
                "strategy is made.") from error
    return [f"CPU:{index}" for index in range(count)]


def place(devices: Any, merge_device: Any, shares: Any = None,
          micro_batches: int = 1) -> Placement:
    """The placement for these arguments of ``TowerStrategy``; raises if they are wrong."""
    count = names.count("micro_batches", micro_batches, _MOST_MICRO_BATCHES, "into how many parts, "
                        "one after another, each tower's rows of a batch are cut")
    rows = rows_of(devices, mixed=shares is not None)
    towers = tuple(row[0] for row in rows)
    staged = len(rows[0]) > 1
    if staged and merge_device is not None:
        raise ValueError(
            f"merge_device={merge_device!r} does not go with towers of {len(rows[0])} stages: a "
            "stage's weights live, merge and update on that stage's devices. Leave it out.")
    if staged and isinstance(shares, str):
        raise ValueError(
            f"shares={shares!r} does not go with towers of {len(rows[0])} stages, only with towers "
            "of one device each. Give a list of a number for each tower.")
    if staged:
        merge_device = towers[0] if len(rows) == 1 else "cpu"
    merge, balanced = _merge(towers, merge_device)
    return Placement(tuple(tower for tower in towers for _ in range(count)), merge, balanced,
                     asked_shares.checked(shares, towers, count),
                     shares if isinstance(shares, str) else "", count,
                     rows if staged else ())


def _merge(towers: Sequence[str], merge_device: Any) -> tuple[str, bool]:
    """The merge device's full name, and whether each variable has its own home."""
    if merge_device is None:  # for GPUs, a simulation shows "balanced" to be best over any links
        gpus = set(map(names.kind_of, towers)) == {"GPU"}
        merge_device = towers[0] if len(towers) == 1 else names.BALANCED if gpus else "cpu"
    name = merge_device.name if names.is_listed(merge_device) else merge_device
    if not isinstance(name, str):
        raise refused.wrong_type("merge_device", name, f'None, "cpu", "{names.BALANCED}" or a '
                                 "device string", names.devices_here())
    balanced = name.lower() == names.BALANCED
    name = "CPU:0" if balanced or name.lower() == "cpu" else name
    return names.full_name(name, "merge_device", merge_device), balanced and len(towers) > 1


def rows_of(devices: Any, mixed: bool = False,
            argument: str = "devices") -> tuple[tuple[str, ...], ...]:
    """The full names of each tower's devices, one per stage.

    ``mixed``: whether CPUs and GPUs may be mixed; ``argument``: the name of the user's argument.
    """
    if devices is None:
        items: list[Any] = [f"GPU:{index}" for index in range(names.gpu_count())] or [_only_cpu()]
    elif isinstance(devices, str) or names.is_listed(devices):
        items = [devices]
    elif isinstance(devices, (list, tuple)):
        items = list(devices)
    else:
        items = _first_devices(argument, devices)
    if not items:
        raise ValueError(f"{argument} is {devices!r}, but at least one tower is needed. "
                         f"{names.devices_here()}")
    rows = tuple(tuple(names.tower_name(item, argument) for item in row)
                 for row in _stages_of(items))
    flat = list(itertools.chain(*rows))
    for name, count in collections.Counter(flat).items():
        if count > 1:
            whose = "stage of each tower" if len(rows[0]) > 1 else "tower"
            raise ValueError(f"{argument} names {names.short_name(name)} twice, but each {whose} "
                             f"needs a device of its own: got {devices!r}. {names.devices_here()}")
    kinds = sorted(set(map(names.kind_of, flat)))
    if len(kinds) > 1 and not mixed:
        hint = ('Say what each is to get, with shares=[...] or shares="measured". '
                if argument == "devices" else "")
        raise ValueError(f"{argument} mixes {' and '.join(kinds)}, but towers that get as many "
                         f"rows must be of one kind: got {devices!r}. {hint}{names.devices_here()}")
    return rows


def _only_cpu() -> str:
    """The CPU; warns if TensorFlow lists no GPU although this machine seems to have one."""
    sign = next(_signs_of_gpus(), None)
    if sign and not tf.config.list_physical_devices("GPU") and (
            os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")):
        warned.warn(
            f"TowerStrategy() trains on one CPU tower: TensorFlow shows no GPU, though {sign}. "
            "What TensorFlow writes when `TF_CPP_MIN_LOG_LEVEL=0 python -c \"import tensorflow as "
            "tf; print(tf.config.list_physical_devices())\"` runs says why; as a rule it was "
            'installed without "tensorflow[and-cuda]", or the driver cannot be reached '
            '(nvidia-smi). If the CPU is meant: TowerStrategy("CPU:0").')
    return "CPU:0"


def _signs_of_gpus() -> Iterator[str]:
    """Signs, in words, that this machine has GPUs to use."""
    yield from (f"there is {path}" for path in glob.glob("/dev/nvidia[0-9]*"))
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn"):
        yield "CUDA's libraries are installed (the package nvidia.cudnn)"


def largest_stage_count(devices: Any) -> int:
    """The most stages that ``devices`` gives a tower; does not initialize TensorFlow's devices."""
    return max(map(len, filter(_is_list, devices)), default=1) if _is_list(devices) else 1


def _is_list(value: Any) -> bool:
    """Whether it is a list or tuple of devices; a ``tf.config.LogicalDevice`` is a tuple, too."""
    return isinstance(value, (list, tuple)) and not names.is_listed(value)


def _stages_of(items: list[Any]) -> list[list[Any]]:
    """Each tower's list of devices, one per stage; raises if their lengths differ."""
    staged = list(map(_is_list, items))
    if not any(staged):
        return [[item] for item in items]
    if not all(staged):
        raise TypeError(
            "devices must be a list of devices, a tower each, or a list of lists, each a tower of "
            f"stages, but got both: {items!r}. {names.devices_here()}")
    counts = [len(row) for row in items]
    if len(set(counts)) > 1 or not counts[0]:
        raise ValueError(
            "devices must give each tower as many stages, at least one, but got towers of "
            f"{', '.join(map(str, counts))} stages: {items!r}. {names.devices_here()}")
    return [list(row) for row in items]


def _first_devices(argument: str, devices: Any) -> list[str]:
    """As many GPUs (CPUs if there is no GPU) as the count ``devices``, from index 0 on."""
    try:
        count = names.whole_number(argument, devices)
    except TypeError:
        raise refused.wrong_type(argument, devices, "None, a count, or a list of GPU ids or device "
                                 "strings", names.devices_here()) from None
    kind = "GPU" if names.gpu_count() else "CPU"
    existing = len(tf.config.list_logical_devices(kind))
    if not 1 <= count <= existing:
        hint = "" if kind == "GPU" else " (split_cpu(n) makes more logical CPU devices)"
        raise ValueError(f"{argument}={devices} asks for {count} towers, but it must be from 1 to "
                         f"the {existing} {kind} device(s) here{hint}. {names.devices_here()}")
    return [f"{kind}:{index}" for index in range(count)]
