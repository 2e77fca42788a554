"""What the examples of ``multi_gpu_model`` share: their arguments, their towers and their data.

Goes in: the command line.  Comes out: a :class:`Setting`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

import towerstrategy


class Setting:
    """One example's setting.

    Attributes:
      gpus: what to give to ``multi_gpu_model``: the GPUs, or CPU towers on a machine with fewer
        than two.
      shape: of an image.
      classes: how many.
      x: random images; y: random labels, one-hot.
      batch_size: of all towers together.
    """

    def __init__(self, description: str, argv: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--image-size", type=int, default=224, help="height and width")
        parser.add_argument("--classes", type=int, default=1000)
        parser.add_argument("--samples", type=int, default=1000)
        parser.add_argument("--towers", type=int, default=None,
                            help="GPUs, or CPU towers on a machine with fewer than two GPUs; "
                                 "default: all GPUs, or two CPU towers")
        given = parser.parse_args(argv)
        there = len(tf.config.list_physical_devices("GPU"))
        count = given.towers or max(there, 2)
        if there >= 2:
            self.gpus = list(range(count))
        else:
            self.gpus = towerstrategy.split_cpu(count)
        self.shape = (given.image_size, given.image_size, 3)
        self.classes = given.classes
        random = np.random.default_rng(0)
        self.x = random.random((given.samples, *self.shape), dtype="float32")
        labels = random.integers(given.classes, size=given.samples)
        self.y = tf.keras.utils.to_categorical(labels, given.classes)
        self.batch_size = 32 * count
