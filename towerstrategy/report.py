"""Where everything sits and how busy each tower is, for people to read.

Goes in: a strategy, or a Keras training.  Comes out: text, and a picture.
"""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import devices as devices_lib
from towerstrategy import variables
from towerstrategy._keras.callback import Callback
from towerstrategy._keras.common import is_tower_strategy
from towerstrategy._report import picture as picture_lib
from towerstrategy._report.events import Events
from towerstrategy._report.sample import Sample
from towerstrategy._report.watch import Watch


def merge_name(placement: devices_lib.Placement) -> str:
    """The merge device as people write it: ``CPU:0`` or ``balanced``."""
    return devices_lib.BALANCED if placement.balanced else devices_lib.short_name(placement.merge)


class _Shown(str):
    """Text that a notebook shows as a table."""

    page = ""

    def _repr_html_(self) -> str:
        return self.page


def describe(strategy: tf.distribute.Strategy) -> str:
    """A table of the strategy's devices: their role, and the variables and bytes they hold."""
    text, page = _described(strategy)
    if not _in_ipython():
        return text  # plain: R's reticulate takes no kind of str but str
    shown = _Shown(text)
    shown.page = page
    return shown


def describe_html(strategy: tf.distribute.Strategy) -> str:
    """The same as HTML, for notebooks."""
    return _described(strategy)[1]


def _in_ipython() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and shell.get_ipython() is not None


def _described(strategy: tf.distribute.Strategy) -> tuple[str, str]:
    placement = getattr(getattr(strategy, "extended", None), "placement", None)
    if placement is None:
        raise TypeError("strategy must be a TowerStrategy, but got "
                        f"{strategy!r} of type {type(strategy).__name__}.")
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for variable in strategy.extended.variables():
        for part in getattr(variable, "_values", (variable,)):
            device = devices_lib.short_name(variables.home_of(part))
            counts[device] = counts.get(device, 0) + 1
            sizes[device] = sizes.get(device, 0) + variables.size_of(part)
    roles = _roles(placement)
    devices = list(roles) + sorted(set(counts) - set(roles))
    rows = [(device, roles.get(device, "variables only"), f"{counts.get(device, 0):,}",
             f"{sizes.get(device, 0):,}") for device in devices]
    number = len(placement.towers)
    title = (f"TowerStrategy: {number} tower{'s' if number > 1 else ''}, merge device "
             f"{merge_name(placement)}")
    header = ("device", "role", "variables", "bytes")
    return (f"{title}\n{table(header, rows, numbers=(2, 3))}",
            _page(title, header, rows, numbers=(2, 3)))


def _page(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]],
          numbers: Sequence[int]) -> str:
    """The table as HTML, in the colors of the page that it is in."""
    def line(row: Sequence[Any], kind: str) -> str:
        cells = (f'<{kind} style="text-align: {"right" if column in numbers else "left"}">'
                 f"{html.escape(str(cell))}</{kind}>" for column, cell in enumerate(row))
        return f"<tr>{''.join(cells)}</tr>"

    return (f"<table><caption>{html.escape(title)}</caption><thead>{line(header, 'th')}</thead>"
            f"<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table>")


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[int] = ()) -> str:
    """A plain text table; the columns whose positions are in ``numbers`` align right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) if column in numbers else cell.ljust(width)
                  for column, (cell, width) in enumerate(zip(row, widths))]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def _roles(placement: devices_lib.Placement) -> dict[str, str]:
    roles = {devices_lib.short_name(device): f"tower {number}"
             for number, device in enumerate(placement.towers)}
    if placement.balanced:
        return {device: f"{role} and home" for device, role in roles.items()}
    merge = devices_lib.short_name(placement.merge)
    roles[merge] = f"{roles[merge]} and merge" if merge in roles else "merge"
    return roles


@dataclasses.dataclass(frozen=True)
class Part:
    """A line of the table: a tower, or another part of the step.

    Attributes:
      name: such as ``"tower 0"`` or ``"merge"``.
      device: where it runs.
      rows: a tower's rows in this epoch; None where they were not counted.
      seconds: in a step, the time in which at least one operation of it was running.
      idle: a tower's share of the step in which none was; None for other parts.
    """

    name: str
    device: str
    rows: int | None
    seconds: float | None
    idle: float | None

    @property
    def is_tower(self) -> bool:
        """Whether this is a tower."""
        return self.name.startswith("tower")


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What ``TowerReport`` knows of an epoch; ``str`` makes the table of it.

    Attributes:
      number: the epoch, counted from 0 as Keras counts.
      seconds: how long it took, validation included.
      parts: the lines of the table.
      sample: the times of one step, or None: none has been sampled yet.
      sampled_in: the epoch that the sampled step belongs to.
    """

    number: int
    seconds: float
    parts: tuple[Part, ...]
    sample: Sample | None
    sampled_in: int | None

    @property
    def rows(self) -> tuple[int | None, ...]:
        """The towers' rows in this epoch."""
        return tuple(part.rows for part in self.parts if part.is_tower)

    def __str__(self) -> str:
        counted = [rows for rows in self.rows if rows is not None]
        title = f"epoch {self.number + 1}: {sum(counted):,} rows in {self.seconds:.3g} s"
        if self.sample is None or self.sampled_in is None:
            title += "; no step sampled yet"
        else:
            when = "" if self.sampled_in == self.number else f" of epoch {self.sampled_in + 1}"
            title += f"; a step{when} took {1e3 * self.sample.step:.3g} ms"
        cells = [(part.name, part.device, "" if part.rows is None else f"{part.rows:,}",
                  "" if part.seconds is None else f"{1e3 * part.seconds:.2f}",
                  "" if part.idle is None else f"{part.idle:.0%}") for part in self.parts]
        header = ("part", "device", "rows", "busy ms a step", "idle")
        return f"{title}\n{table(header, cells, numbers=(2, 3, 4))}"


class TowerReport(Callback):
    """A Keras callback that shows, epoch by epoch, whether the towers are used.

    It works with Keras 3 and with tf_keras.  After each epoch it prints a table:

    - **rows**: each tower's rows of the epoch, all of them counted.
    - **busy ms a step**: of one sampled step, the time in which at least one operation of this line
      was running.  Work of a tower that runs in parallel counts once, so no line has more than the
      step.  A tower's operations are those of the model and its gradients, the reading of weights
      among them; ``merge`` is what runs where the towers meet, ``update`` the optimizer, ``split``
      the dealing of rows in the input pipeline (beside the step), ``input`` the step's waiting for
      its batch.
    - **idle**: the share of the step in which no operation of that tower was running.  CPU towers
      share the machine's cores: one of them can be busy and still wait for a core.

    The sampled step runs under TensorFlow's profiler.  A step is sampled when that leaves the cost
    of samples below ``most`` of the time trained; the first always is.  An epoch without a sample
    shows the last one.  The picture is drawn when that costs no more than ``most`` either, and when
    the training ends.  Without this callback nothing is measured and nothing stays behind.
    With several machines each shows its own towers.

    Args:
      picture: a PNG file to draw (needs matplotlib), or None.
      most: the share of the training's time that samples may take, and pictures.
      print_fn: gets each epoch's table; None prints nothing.
      log_dir: a folder for TensorBoard, or None: a run a tower with its rows, busy time and idle
        share, one with the step's other parts, and the picture where matplotlib is installed.

    Attributes:
      epochs: what was found, one :class:`Epoch` each.

    Raises:
      TypeError, ValueError: an argument that cannot be used.

    >>> from towerstrategy.report import TowerReport
    >>> strategy = TowerStrategy(split_cpu(4)[:2])
    >>> with strategy.scope():
    ...   model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(1)])
    ...   model.compile("sgd", "mse")
    >>> report = TowerReport(print_fn=None)
    >>> x, y = np.ones([9, 3]), np.ones([9, 1])
    >>> history = model.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[report])
    >>> [epoch.rows for epoch in report.epochs]
    [(5, 4), (5, 4)]
    >>> print(report.epochs[-1])
    epoch 2: 9 rows in ...
    part     device  rows  busy ms a step  idle
    -------  ------  ----  --------------  ----
    tower 0  CPU:0      5  ...
    tower 1  CPU:1      4  ...
    merge    CPU:0         ...
    update   CPU:0         ...
    split    CPU:0         ...
    input    CPU:0         ...
    """

    def __init__(self, picture: str | os.PathLike[str] | None = None, *, most: float = 0.01,
                 print_fn: Callable[[str], Any] | None = print,
                 log_dir: str | os.PathLike[str] | None = None) -> None:
        for name, path, kind in (("picture", picture, "PNG file"), ("log_dir", log_dir, "folder")):
            if path is not None and not isinstance(path, (str, os.PathLike)):
                raise TypeError(f"{name} must be None or the path of a {kind}, but got "
                                f"{path!r} of type {type(path).__name__}.")
        if not 0 < most <= 1:
            raise ValueError(f"most must be a share of the training's time, above 0 and at most 1, "
                             f"but got {most!r}.")
        self.picture = picture
        self.log_dir = log_dir
        self.epochs: list[Epoch] = []
        self._most = most
        self._print = print_fn
        self._watch: Watch | None = None
        self._events: Events | None = None
        self._drawn = False
        self._picture_cost = 1.0  # seconds; a guess until the first is drawn
        self._pictures_cost = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        strategy = self.model.distribute_strategy
        if not is_tower_strategy(strategy):
            raise ValueError(
                f"TowerReport is for models that a TowerStrategy trains, but model "
                f"{self.model.name!r} has {strategy!r}. Compile it in the strategy's scope, or "
                "call strategy.adopt(model).")
        self.epochs = []
        self._pictures_cost = 0.0
        self._watch = Watch(self.model, self._most)
        if self.log_dir is not None:
            self._events = Events(self.log_dir, strategy.extended.first_replica)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        self._watching.begin(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del logs
        watch = self._watching
        with watch.spending():
            watch.end()
            self.epochs.append(_epoch(epoch, watch))
            if self._print is not None:
                self._print(f"\n{self.epochs[-1]}")
            if self._events is not None:
                self._events.write(self.epochs[-1])
        self._drawn = watch.affords(self._pictures_cost + self._picture_cost)
        if self._drawn:
            self._draw()

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        self._watching.close()
        self._watch = None
        if not self._drawn:
            self._draw()
        if self._events is not None:
            self._events.close()
            self._events = None

    @property
    def _watching(self) -> Watch:
        if self._watch is None:
            raise RuntimeError("TowerReport sees the beginning of an epoch, or its end, outside of "
                               "a training: give it to model.fit(callbacks=[...]).")
        return self._watch

    def _draw(self) -> None:
        shown = self._events is not None and importlib.util.find_spec("matplotlib") is not None
        if self.picture is None and not shown:
            return
        start = time.perf_counter()
        png = picture_lib.draw(self.epochs)
        if png is not None and self.picture is not None:
            pathlib.Path(self.picture).write_bytes(png)
        if png is not None and shown and self._events is not None:
            self._events.show(png, self.epochs[-1].number)
        self._picture_cost = time.perf_counter() - start
        self._pictures_cost += self._picture_cost


def _epoch(number: int, watch: Watch) -> Epoch:
    placement, sample, rows = watch.placement, watch.sample, watch.rows
    lines = [Part(f"tower {tower}", devices_lib.short_name(device),
                  None if rows is None else rows[tower],
                  None if sample is None else sample.towers[tower],
                  None if sample is None else sample.idle(tower))
             for tower, device in enumerate(placement.towers)]
    where = merge_name(placement)
    for name, device in (("merge", where), ("update", where), ("split", "CPU:0"),
                         ("input", "CPU:0")):
        lines.append(Part(name, device, None, None if sample is None else getattr(sample, name),
                          None))
    return Epoch(number, watch.seconds, tuple(lines), sample, watch.sampled_in)
