"""Keras' second example of ``multi_gpu_model``: weights are moved to the CPU.

Goes in: random images.  Comes out: Xception trained on several GPUs.

    pip install .     # after `make demo`: .venv/bin/python has it
    python examples/multi_gpu_cpu_relocation.py
    python examples/multi_gpu_cpu_relocation.py --image-size 71 --classes 10 --samples 64  # CPU
"""

from __future__ import annotations

from collections.abc import Sequence

import multi_gpu_setting
import tensorflow as tf

from towerstrategy import multi_gpu_model


def main(argv: Sequence[str] | None = None) -> None:
    setting = multi_gpu_setting.Setting(__doc__.splitlines()[0], argv)

    # Not needed to change the device scope for the model's definition:
    model = tf.keras.applications.Xception(weights=None, input_shape=setting.shape,
                                           classes=setting.classes)
    try:
        parallel_model = multi_gpu_model(model, gpus=setting.gpus, cpu_relocation=True)
        print("Training using multiple GPUs..")
    except ValueError:
        parallel_model = model
        print("Training using single GPU or CPU..")
    parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")
    parallel_model.fit(setting.x, setting.y, epochs=1, batch_size=setting.batch_size)


if __name__ == "__main__":
    main()
