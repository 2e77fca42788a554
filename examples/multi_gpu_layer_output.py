"""Computes the output of a layer on several GPUs, with ``multi_gpu_model``.

Goes in: random images.  Comes out: the outputs of Xception's last block, computed on several GPUs.
The parallel model has the layers of the template, so ``get_layer`` finds them by name.

    pip install .     # after `make demo`: .venv/bin/python has it
    python examples/multi_gpu_layer_output.py
    python examples/multi_gpu_layer_output.py --image-size 71 --classes 10 --samples 64  # CPU
"""

from __future__ import annotations

from collections.abc import Sequence

import multi_gpu_setting
import numpy as np
import tensorflow as tf

from towerstrategy import multi_gpu_model


def main(argv: Sequence[str] | None = None) -> None:
    setting = multi_gpu_setting.Setting(__doc__.splitlines()[0], argv)
    model = tf.keras.applications.Xception(weights=None, input_shape=setting.shape,
                                           classes=setting.classes)
    parallel_model = multi_gpu_model(model, gpus=setting.gpus)

    extractor = tf.keras.Model(inputs=parallel_model.input,
                               outputs=parallel_model.get_layer("block14_sepconv2_act").output)
    parallel_extractor = multi_gpu_model(extractor, gpus=setting.gpus)
    features = parallel_extractor.predict(setting.x, batch_size=setting.batch_size)

    first = extractor.predict(setting.x[:1])
    print("features:", features.shape, "differ from one device's by",
          np.abs(features[:1] - first).max())


if __name__ == "__main__":
    main()
