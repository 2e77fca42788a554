"""Keras' first example of ``multi_gpu_model``: weights are on the CPU, and gradients summed there.

Goes in: random images.  Comes out: Xception trained on several GPUs, and saved as a plain model in
``out/my_model.keras``.

    pip install .     # after `make demo`: .venv/bin/python has it
    python examples/multi_gpu_weights_on_cpu.py
    python examples/multi_gpu_weights_on_cpu.py --image-size 71 --classes 10 --samples 64  # CPU
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import multi_gpu_setting
import tensorflow as tf

from towerstrategy import multi_gpu_model


def main(argv: Sequence[str] | None = None) -> None:
    setting = multi_gpu_setting.Setting(__doc__.splitlines()[0], argv)

    # Instantiate the base model (or "template" model), its weights in the CPU's memory.
    with tf.device("/cpu:0"):
        model = tf.keras.applications.Xception(weights=None, input_shape=setting.shape,
                                               classes=setting.classes)

    # Replicates the model on the GPUs.
    parallel_model = multi_gpu_model(model, gpus=setting.gpus)
    parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")

    # This `fit` call is distributed on the GPUs: each batch is split over them.
    parallel_model.fit(setting.x, setting.y, epochs=1, batch_size=setting.batch_size)

    # Either of the two can be saved: they share the same weights.
    file = pathlib.Path("out/my_model.keras")
    file.parent.mkdir(exist_ok=True)
    model.save(file)
    print(f"saved {file}:", tf.keras.models.load_model(file).count_params(), "parameters")


if __name__ == "__main__":
    main()
