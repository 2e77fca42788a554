"""What the user asked for -> the tower devices and the merge device.

Goes in: ``devices``, ``merge_device`` and ``shares`` as given to ``TowerStrategy``, and the logical
devices that TensorFlow shows.  Comes out: a :class:`Placement`, with full device names.
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

# TensorFlow makes as many as it is asked for, until memory ends.
_MOST_LOGICAL_CPUS = 1024
_MOST_MICRO_BATCHES = 1024  # each is a replica, which costs memory and tracing of its own


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a strategy runs."""

    towers: tuple[str, ...]  # full device names, one a replica: a tower's for each micro-batch
    # Where results are merged that belong to no variable, and, if not ``balanced``, variables live.
    merge: str
    balanced: bool  # whether each variable has a tower of its own choosing as home
    shares: tuple[float, ...] | None = None  # a number a replica; None where all get as many rows
    shares_from: str = ""  # what they were taken from: "measured", "memory", or nothing of these
    micro_batches: int = 1  # into how many parts, one after another, a tower's rows are cut
    # Of towers of several *stages* the devices, stage by stage, of which ``towers`` has the first.
    rows: tuple[tuple[str, ...], ...] = ()

    @property
    def stages(self) -> int:
        return len(self.rows[0]) if self.rows else 1

    def row(self, replica: int) -> tuple[str, ...]:
        """The devices of a replica's stages."""
        return self.rows[replica // self.micro_batches] if self.rows else (self.towers[replica],)

    def stage_at(self, device: str) -> int | None:
        """The stage, of whichever tower, that is on ``device``; None where that is no stage's."""
        return next((stage for row in self.rows for stage, name in enumerate(row)
                     if name == device), None)

    @property
    def devices(self) -> tuple[str, ...]:
        """Full device names, one a tower."""
        return self.towers[::self.micro_batches]

    def name(self, replica: int) -> str:
        """What people call a replica: ``tower 1``, or ``micro-batch 3 of tower 1``."""
        tower, number = divmod(replica, self.micro_batches)
        return f"micro-batch {number} of " * (self.micro_batches > 1) + f"tower {tower}"

    def note(self, replica: int, rows: str) -> str:
        """What an error says that was raised in a replica, whose ``rows`` are in words."""
        none = (" Some operations cannot work on no rows, TensorFlow's convolutions on the CPU "
                "among them: give each batch as many rows as there are towers.")
        return (f"This happened in {self.name(replica)} on {names.short_name(self.towers[replica])}"
                + (f", which has {rows}." if rows else ".") + none * rows.startswith("none"))

    @property
    def merge_note(self) -> str:
        """What an error says that was raised in the function given to ``merge_call``."""
        return ("This happened at the sync point (merge_call), on the merge device "
                f"{names.short_name(self.merge)}.")

    @property
    def merge_name(self) -> str:
        """The merge device as people write it: ``CPU:0``, ``balanced`` or ``each stage's``."""
        if self.rows:
            return "each stage's"
        return names.BALANCED if self.balanced else names.short_name(self.merge)

    @property
    def title(self) -> str:
        """What the towers are: ``4 towers``, or ``1 tower of 4 stages and 2 micro-batches``."""
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
        # A compiled step has an order of its own, which would run the micro-batches side by side.
        if self.micro_batches > 1 or self.rows:
            return False
        default = "GPU:0" if names.gpu_count() else "CPU:0"
        return {*self.towers, self.merge} == {names.tower_name(default)}

    @functools.cached_property
    def kinds(self) -> frozenset[str]:
        """The towers' kinds of device; several only where shares were asked for."""
        return frozenset(map(names.kind_of, (*self.towers, *itertools.chain(*self.rows))))

    @property
    def towers_on_host(self) -> bool:
        """Whether the towers share the host's memory, so that no batch need be brought to them."""
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
    wanted = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    try:
        tf.config.set_logical_device_configuration(cpus[0], wanted)
    except RuntimeError as error:
        there = len(tf.config.list_logical_devices("CPU"))
        if there != count:
            raise RuntimeError(
                f"split_cpu(count={count}) came after TensorFlow had started with {there} CPU "
                "device(s), and that number is fixed for the life of the process. Call split_cpu "
                "first thing after `import tensorflow`, before any tensor, variable, model or "
                "strategy is made.") from error
    return [f"CPU:{index}" for index in range(count)]


def place(devices: Any, merge_device: Any, shares: Any = None,
          micro_batches: int = 1) -> Placement:
    """Resolves, and checks, the arguments of ``TowerStrategy`` that say where."""
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
            f"shares={shares!r} does not go with towers of {len(rows[0])} stages, as it is asked "
            "of one device a tower. Give a list of a number for each tower.")
    asked = merge_device if not staged else towers[0] if len(rows) == 1 else "cpu"
    merge, balanced = _merge(towers, asked)
    return Placement(tuple(tower for tower in towers for _ in range(count)), merge, balanced,
                     asked_shares.checked(shares, towers, count),
                     shares if isinstance(shares, str) else "", count,
                     rows if staged else ())


def _merge(towers: Sequence[str], asked: Any) -> tuple[str, bool]:
    """The merge device, and whether each variable has a home of its own."""
    # By default it is for GPUs what a simulation shows to be best over any links.
    if asked is None:
        gpus = set(map(names.kind_of, towers)) == {"GPU"}
        asked = towers[0] if len(towers) == 1 else names.BALANCED if gpus else "cpu"
    given = asked
    if names.is_listed(asked):
        asked = asked.name
    if not isinstance(asked, str):
        raise refused.wrong_type("merge_device", asked, f'None, "cpu", "{names.BALANCED}" or a '
                                 "device string", names.devices_here())
    balanced = asked.lower() == names.BALANCED
    name = "CPU:0" if balanced or asked.lower() == "cpu" else asked
    return names.full_name(name, "merge_device", given), balanced and len(towers) > 1


def rows_of(devices: Any, mixed: bool = False,
            argument: str = "devices") -> tuple[tuple[str, ...], ...]:
    """The towers, each a row of the devices of its stages, one as a rule.

    ``mixed`` says whether CPU and GPU may be in it, ``argument`` what the user calls ``devices``.
    """
    if devices is None:
        asked: list[Any] = [f"GPU:{index}" for index in range(names.gpu_count())] or [_only_cpu()]
    elif isinstance(devices, str) or names.is_listed(devices):
        asked = [devices]
    elif isinstance(devices, (list, tuple)):
        asked = list(devices)
    else:
        asked = _counted(argument, devices)
    if not asked:
        raise ValueError(f"{argument} is {devices!r}, but at least one tower is needed. "
                         f"{names.devices_here()}")
    rows = tuple(tuple(names.tower_name(item, argument) for item in row)
                 for row in _of_stages(asked))
    found = list(itertools.chain(*rows))
    for name, count in collections.Counter(found).items():
        if count > 1:
            whose = "stage of each tower" if len(rows[0]) > 1 else "tower"
            raise ValueError(f"{argument} names {names.short_name(name)} twice, but each {whose} "
                             f"needs a device of its own: got {devices!r}. {names.devices_here()}")
    kinds = sorted(set(map(names.kind_of, found)))
    if len(kinds) > 1 and not mixed:
        hint = ('Say what each is to get, with shares=[...] or shares="measured". '
                if argument == "devices" else "")
        raise ValueError(f"{argument} mixes {' and '.join(kinds)}, but towers that get as many "
                         f"rows must be of one kind: got {devices!r}. {hint}{names.devices_here()}")
    return rows


def _only_cpu() -> str:
    """The CPU, where TensorFlow shows no GPU; a warning where this machine seems to have one."""
    there = next(_traces_of_gpus(), None)
    if there and not tf.config.list_physical_devices("GPU") and (
            os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")):
        warned.warn(
            f"TowerStrategy() trains on one CPU tower: TensorFlow shows no GPU, though {there}. "
            "What TensorFlow writes when `TF_CPP_MIN_LOG_LEVEL=0 python -c \"import tensorflow as "
            "tf; print(tf.config.list_physical_devices())\"` runs says why; as a rule it was "
            'installed without "tensorflow[and-cuda]", or the driver cannot be reached '
            '(nvidia-smi). If the CPU is meant: TowerStrategy("CPU:0").')
    return "CPU:0"


def _traces_of_gpus() -> Iterator[str]:
    """What shows that GPUs are meant to be used here, in words."""
    yield from (f"there is {path}" for path in glob.glob("/dev/nvidia[0-9]*"))
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn"):
        yield "CUDA's libraries are installed (the package nvidia.cudnn)"


def stages_asked(devices: Any) -> int:
    """How many stages ``devices`` gives a tower at the most; no device is looked at."""
    return max(map(len, filter(_is_list, devices)), default=1) if _is_list(devices) else 1


def _is_list(value: Any) -> bool:
    """Whether it is several devices; devices as ``tf.config`` lists them are tuples, too."""
    return isinstance(value, (list, tuple)) and not names.is_listed(value)


def _of_stages(asked: list[Any]) -> list[list[Any]]:
    """Each tower as a list of the devices of its stages, as many for each."""
    staged = list(map(_is_list, asked))
    if not any(staged):
        return [[item] for item in asked]
    if not all(staged):
        raise TypeError(
            "devices must be a list of devices, a tower each, or a list of lists, each a tower of "
            f"stages, but got both: {asked!r}. {names.devices_here()}")
    counts = [len(row) for row in asked]
    if len(set(counts)) > 1 or not counts[0]:
        raise ValueError(
            "devices must give each tower as many stages, at least one, but got towers of "
            f"{', '.join(map(str, counts))} stages: {asked!r}. {names.devices_here()}")
    return [list(row) for row in asked]


def _counted(argument: str, devices: Any) -> list[str]:
    try:
        count = names.whole_number(argument, devices)
    except TypeError:
        raise refused.wrong_type(argument, devices, "None, a count, or a list of GPU ids or device "
                                 "strings", names.devices_here()) from None
    kind = "GPU" if names.gpu_count() else "CPU"
    there = len(tf.config.list_logical_devices(kind))
    if not 1 <= count <= there:
        hint = "" if kind == "GPU" else " (split_cpu(n) makes more logical CPU devices)"
        raise ValueError(f"{argument}={devices} asks for {count} towers, but it must be from 1 to "
                         f"the {there} {kind} device(s) there are{hint}. {names.devices_here()}")
    return [f"{kind}:{index}" for index in range(count)]
