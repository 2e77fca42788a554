"""The arguments, towers and data that the examples of ``multi_gpu_model`` share.

Goes in: the command line.  Comes out: a :class:`Setting`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

import towerstrategy


class Setting:
    """The towers and data of an example.

    Attributes:
      gpus: the argument of ``multi_gpu_model``: the GPUs, or CPU towers on a machine with fewer
        than two GPUs.
      shape: the shape of an image.
      classes: the number of classes.
      x, y: random images and random labels, one-hot.
      batch_size: the global batch size.
    """

    def __init__(self, description: str, argv: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--image-size", type=int, default=224, help="height and width")
        parser.add_argument("--classes", type=int, default=1000)
        parser.add_argument("--samples", type=int, default=1000)
        parser.add_argument("--towers", type=int, default=None,
                            help="GPUs, or CPU towers on a machine with fewer than two GPUs; "
                                 "default: all GPUs, or two CPU towers")
        arguments = parser.parse_args(argv)
        available = len(tf.config.list_physical_devices("GPU"))
        count = arguments.towers or max(available, 2)
        if available >= 2:
            self.gpus = list(range(count))
        else:
            self.gpus = towerstrategy.split_cpu(count)
        self.shape = (arguments.image_size, arguments.image_size, 3)
        self.classes = arguments.classes
        random = np.random.default_rng(0)
        self.x = random.random((arguments.samples, *self.shape), dtype="float32")
        labels = random.integers(arguments.classes, size=arguments.samples)
        self.y = tf.keras.utils.to_categorical(labels, arguments.classes)
        self.batch_size = 32 * count
