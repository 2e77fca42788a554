"""``TowerReport``: a callback that reports how busy each tower is.

Goes in: a Keras training.  Comes out: tables, a picture, and events for TensorBoard.
"""

from __future__ import annotations

import numbers
import os
import pathlib
from collections.abc import Callable
from typing import Any

from towerstrategy import refused
from towerstrategy._keras.callbacks import Callback
from towerstrategy.extras.report import picture as picture_lib, quiet
from towerstrategy.extras.report.epochs import Epoch, Watch
from towerstrategy.extras.report.events import Events
from towerstrategy.placement import kind


class TowerReport(Callback):
    """A Keras callback that reports each epoch's rows and how busy each tower is.

    It works with Keras 3 and with tf_keras.  When the next epoch begins, or the training ends, it
    prints an epoch's table.  The rows of each tower are counted in all steps.  The times are those
    of one step, which runs under TensorFlow's profiler: the time in which at least one operation of
    a line is running, and the share of the step in which none is.  ``docs/tower_report.md``
    explains all lines and columns.

    A step is sampled if all samples still cost less than ``most`` of the training's time, or of
    twenty seconds; the first one always is.  For an epoch without a sample, it prints a line with
    the rows.  It draws the picture at the end.  Without this callback nothing is measured.  With
    several machines, each reports its own towers.  An error in a report is a warning while the
    model trains, and the training goes on.

    Args:
      picture: a PNG file to draw, in an existing folder, or None.  Needs matplotlib, which
        ``pip install "towerstrategy[demo]"`` installs.
      most: the share of the training's time that samples may take; trainings of fewer than twenty
        seconds count as twenty.
      print_fn: a function that gets each epoch's table; None prints nothing.
      log_dir: a folder for TensorBoard, or None.  It gets a run for each tower with its rows, busy
        time and idle share, a run for each stage, and one with the step's other parts.

    Attributes:
      epochs: an :class:`Epoch` for each epoch.

    Raises:
      TypeError, ValueError: an argument is invalid.
      ModuleNotFoundError: ``picture`` is set, and matplotlib is not installed.

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
        _check(picture, log_dir, most, print_fn)
        self.picture = picture
        self.log_dir = log_dir
        self.epochs: list[Epoch] = []
        self._most = most
        self._print = print_fn
        self._watch: Watch | None = None
        self._events: Events | None = None
        self._printed = 0  # epochs

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        strategy = self.model.distribute_strategy
        if not kind.is_tower_strategy(strategy):
            raise ValueError(
                f"TowerReport is for models that a TowerStrategy trains, but model "
                f"{self.model.name!r} is trained by another or none ({type(strategy).__name__}). "
                "Compile it in the strategy's scope, or call strategy.adopt(model).")
        self.epochs, self._printed = [], 0
        with quiet.harmless("begin to watch", self._end_watch):
            self._watch = Watch(self.model, self._most)
        if self.log_dir is not None:
            self._events = Events(self.log_dir, strategy.extended.first_replica
                                  // strategy.extended.placement.micro_batches)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        self._print_new()
        if self._watch is not None:
            with quiet.harmless("watch an epoch", self._end_watch):
                self._watch.begin(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del epoch, logs
        if self._watch is None:
            return
        # After an error it does not watch on: the later epochs' numbers would be wrong.
        with quiet.harmless("read what an epoch did", self._end_watch):
            self.epochs.append(self._watch.end())
            self._write(lambda events: events.write(self.epochs[-1]))

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        self._print_new()
        self._end_watch()
        with quiet.harmless("draw its picture"):
            if self.picture is not None and (png := picture_lib.draw(self.epochs)) is not None:
                pathlib.Path(self.picture).write_bytes(png)
        self._write(Events.close)
        self._events = None

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _write(self, write: Callable[[Events], None]) -> None:
        if self._events is not None:
            with quiet.harmless(f"write into log_dir={str(self.log_dir)!r}"):
                write(self._events)

    def _print_new(self) -> None:
        """Prints new epochs; not at their end, because Keras' progress bar is still open then."""
        for epoch in self.epochs[self._printed:]:
            with quiet.harmless("print a table (print_fn)"):
                if self._print is not None:
                    self._print(epoch.brief)
        self._printed = len(self.epochs)


def _check(picture: Any, log_dir: Any, most: Any, print_fn: Any) -> None:
    """Raises now for arguments that would fail during a training, or after it."""
    for name, path, what in (("picture", picture, "PNG file"), ("log_dir", log_dir, "folder")):
        refused.check_type(name, path, (str, os.PathLike, type(None)),
                           f"None or the path of a {what}")
    if isinstance(most, bool) or not isinstance(most, numbers.Real):
        raise refused.wrong_type("most", most, "a number, a share of the training's time")
    if not 0 < float(most) <= 1:
        raise ValueError(f"most must be a share of the training's time, above 0 and at most 1, "
                         f"but got {most!r}.")
    if print_fn is not None and not callable(print_fn):
        raise refused.wrong_type("print_fn", print_fn, "None or a function of a text")
    if log_dir is not None and os.path.exists(log_dir) and not os.path.isdir(log_dir):
        raise ValueError(f"log_dir must be a folder, or be free for one, but {str(log_dir)!r} is a "
                         "file.")
    if picture is not None:
        picture_lib.check(picture)
