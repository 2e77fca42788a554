"""The output of a layer of a model that ``multi_gpu_model`` made.

Goes in: random images.  Comes out: the features that Xception's last block makes of them, computed
on several GPUs.  The parallel model has the template's layers, so one is asked for by its name.

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

    features_of = tf.keras.Model(inputs=parallel_model.input,
                                 outputs=parallel_model.get_layer("block14_sepconv2_act").output)
    parallel_features_of = multi_gpu_model(features_of, gpus=setting.gpus)
    features = parallel_features_of.predict(setting.x, batch_size=setting.batch_size)

    one = features_of.predict(setting.x[:1])
    print("features:", features.shape, "and from one device the same to",
          np.abs(features[:1] - one).max())


if __name__ == "__main__":
    main()
