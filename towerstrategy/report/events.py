"""The report of a training as TensorBoard's events.

Goes in: what ``TowerReport`` found, epoch by epoch, and its picture.  Comes out: files for
TensorBoard, a run for each tower, so that TensorBoard draws the towers into one chart, one for each
of its stages, and one for the step.  They are written without the package ``tensorboard``.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import tensorflow as tf

from towerstrategy.report.epochs import Epoch

_Metadata = type(tf.compat.v1.Summary.Value().metadata)


class Events:
    """Writes one training.

    Args:
      folder: TensorBoard's ``--logdir``, or a folder in it.
      first_tower: the number of this machine's first tower among those of all machines.
    """

    def __init__(self, folder: str | os.PathLike[str], first_tower: int) -> None:
        self._folder = os.fspath(folder)
        self._first = first_tower
        self._step = f"step_from_tower_{first_tower}" if first_tower else "step"
        self._writers: dict[str, Any] = {}

    def write(self, epoch: Epoch) -> None:
        """An epoch's numbers; times only in the epoch that they were sampled in."""
        sampled = epoch.sampled
        towers = [part for part in epoch.parts if part.is_tower]
        stages = [part for part in epoch.parts if part.is_stage]
        lines = [(f"tower_{number}", "towers", part)
                 for number, part in enumerate(towers, self._first)]
        # Stages are on one machine, so their towers have the same numbers everywhere.
        lines += [(part.name.replace(", ", "_").replace(" ", "_"), "stages", part)
                  for part in stages]
        for run, chart, part in lines:
            self._scalar(run, f"{chart}/rows", part.rows, epoch.number)
            if sampled:
                self._scalar(run, f"{chart}/busy_ms_a_step", _ms(part.seconds), epoch.number)
                self._scalar(run, f"{chart}/idle_share", part.idle, epoch.number)
        if sampled:
            self._scalar(self._step, "step/step_ms", _ms(sampled.step), epoch.number)
            self._scalar(self._step, "step/bubble", epoch.bubble, epoch.number)
            for part in epoch.parts[len(lines):]:
                self._scalar(self._step, f"step/{part.name}_ms", _ms(part.seconds), epoch.number)
        self._flush()

    def show(self, png: bytes, number: int) -> None:
        """The picture, as of epoch ``number``."""
        width, height = struct.unpack(">II", png[16:24])  # PNG's first chunk: its size
        self._write(self._step, "towers", "images", [str(width), str(height), png], number)
        self._flush()

    def close(self) -> None:
        """The training has ended."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _scalar(self, run: str, tag: str, value: float | None, number: int) -> None:
        if value is not None:
            self._write(run, tag, "scalars", tf.constant(value, tf.float32), number)

    def _write(self, run: str, tag: str, plugin: str, value: Any, number: int) -> None:
        metadata = _Metadata()
        metadata.plugin_data.plugin_name = plugin
        with tf.device("CPU:0"):
            if run not in self._writers:
                self._writers[run] = tf.summary.create_file_writer(
                    os.path.join(self._folder, run))
            with self._writers[run].as_default(), tf.summary.record_if(True):
                tf.summary.write(tag, value, number, metadata)

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
