"""Writes the report of a training for TensorBoard, without the package ``tensorboard``.

Goes in: the epochs of ``TowerReport``.  Comes out: files of events: a run for each
tower, so that TensorBoard draws all towers into one chart; one for each stage; one for the step.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from towerstrategy.extras.report.epochs import Epoch

_Metadata = type(tf.compat.v1.Summary.Value().metadata)


class Events:
    """Writes one training into ``folder``; ``first_tower`` is the first tower on this machine."""

    def __init__(self, folder: str | os.PathLike[str], first_tower: int) -> None:
        self._folder = os.fspath(folder)
        self._first = first_tower
        self._writers: dict[str, Any] = {}

    def write(self, epoch: Epoch) -> None:
        """Writes an epoch's rows, and its times if a step of this epoch was sampled."""
        step = f"step_from_tower_{self._first}" if self._first else "step"
        for index, part in enumerate(epoch.parts):
            times = {"busy_ms_a_step": part.seconds, "idle_share": part.idle}
            if part.is_stage:  # only on one machine, so the name has the tower's right number
                run, chart = part.name.replace(", ", "_").replace(" ", "_"), "stages"
            elif part.is_tower:
                number = sum(other.is_tower for other in epoch.parts[:index])
                run, chart = f"tower_{self._first + number}", "towers"
                self._scalar(run, "towers/rows", part.rows, epoch.number)
            else:
                run, chart, times = step, "step", {f"{part.name}_ms": part.seconds}
            for tag, value in times.items() if epoch.sampled else ():
                self._scalar(run, f"{chart}/{tag}", value, epoch.number)
        if epoch.sampled:
            self._scalar(step, "step/step_ms", epoch.sampled.step, epoch.number)
            self._scalar(step, "step/bubble", epoch.bubble, epoch.number)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _scalar(self, run: str, tag: str, value: float | None, number: int) -> None:
        if value is None:
            return
        value *= 1e3 if "_ms" in tag else 1  # seconds
        metadata = _Metadata()
        metadata.plugin_data.plugin_name = "scalars"
        with tf.device("CPU:0"):
            if run not in self._writers:
                self._writers[run] = tf.summary.create_file_writer(
                    os.path.join(self._folder, run), max_queue=0)  # to show an epoch at once
            with self._writers[run].as_default(), tf.summary.record_if(True):
                tf.summary.write(tag, tf.constant(value, tf.float32), number, metadata)
