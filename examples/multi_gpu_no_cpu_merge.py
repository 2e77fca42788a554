"""Keras' third example of ``multi_gpu_model``: gradients are summed on the first GPU (for NVLink).

Goes in: random images.  Comes out: Xception trained on several GPUs.

    pip install .     # after `make demo`: .venv/bin/python has it
    python examples/multi_gpu_no_cpu_merge.py
    python examples/multi_gpu_no_cpu_merge.py --image-size 71 --classes 10 --samples 64  # CPU
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
        parallel_model = multi_gpu_model(model, gpus=setting.gpus, cpu_merge=False)
        print("Training using multiple GPUs..")
    except ValueError:
        parallel_model = model
        print("Training using single GPU or CPU..")
    parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")
    parallel_model.fit(setting.x, setting.y, epochs=1, batch_size=setting.batch_size)


if __name__ == "__main__":
    main()
