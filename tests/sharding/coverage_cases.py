"""What :mod:`coverage` traces: layers, losses, metrics, optimizers, small models, backbones.

Goes in: one of the two Kerases.  Comes out: for each name a function that makes a :class:`Case`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

IMAGE, SERIES, ROW, SMALL = (8, 8, 3), (6, 4), (5,), (8, 8, 4)
VOLUME, FRAMES = (6, 6, 6, 2), (4, 8, 8, 2)


@dataclasses.dataclass
class Case:
    """A function of a batch, and what the batch is."""

    step: Callable[..., Any]
    batch: Sequence[tf.TensorSpec]


def _rows(shape: Sequence[int | None], dtype: Any = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec([None, *shape], dtype)


def _names(text: str) -> list[str]:
    return text.split()


# Layers: what each is made with, and the shapes of its inputs.

LAYERS: dict[str, tuple[dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    **{name: ({}, (ROW,)) for name in _names("""
        ActivityRegularization ELU LeakyReLU PReLU ReLU Softmax ReLU6 Flatten Masking
        UnitNormalization BatchNormalization LayerNormalization RMSNormalization""")},
    **{f"Activation:{name}": ({"activation": name}, (ROW,)) for name in _names("""
        celu elu exponential gelu glu hard_shrink hard_sigmoid hard_tanh leaky_relu linear
        log_sigmoid log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus
        softsign sparse_plus sparsemax squareplus swish tanh tanh_shrink threshold""")},
    "Dense": ({"units": 4, "kernel_regularizer": "l2", "use_bias": True}, (ROW,)),
    "Dense:series": ({"units": 4}, (SERIES,)),
    "EinsumDense": ({"equation": "abc,cd->abd", "output_shape": (None, 7)}, (SERIES,)),
    "Dropout": ({"rate": 0.5}, (ROW,)),
    "AlphaDropout": ({"rate": 0.5}, (ROW,)),
    "GaussianDropout": ({"rate": 0.5}, (ROW,)),
    "GaussianNoise": ({"stddev": 0.5}, (ROW,)),
    "SpatialDropout1D": ({"rate": 0.5}, (SERIES,)),
    "SpatialDropout2D": ({"rate": 0.5}, (IMAGE,)),
    "SpatialDropout3D": ({"rate": 0.5}, (VOLUME,)),
    "BatchNormalization:image": ({}, (IMAGE,)),
    "BatchNormalization:series": ({}, (SERIES,)),
    "BatchNormalization:channels_first": ({"axis": 1}, (IMAGE,)),
    "GroupNormalization": ({"groups": 2}, (SMALL,)),
    "SpectralNormalization": ({"layer": ("Dense", {"units": 4})}, (ROW,)),
    "Normalization": ({"mean": 1.0, "variance": 2.0}, (ROW,)),
    "Conv1D": ({"filters": 4, "kernel_size": 3}, (SERIES,)),
    "Conv1D:causal": ({"filters": 4, "kernel_size": 3, "padding": "causal"}, (SERIES,)),
    "Conv2D": ({"filters": 4, "kernel_size": 3, "dilation_rate": 2}, (IMAGE,)),
    "Conv2D:groups": ({"filters": 4, "kernel_size": 3, "groups": 2}, (SMALL,)),
    "Conv3D": ({"filters": 4, "kernel_size": 3}, (VOLUME,)),
    "Conv1DTranspose": ({"filters": 4, "kernel_size": 3}, (SERIES,)),
    "Conv2DTranspose": ({"filters": 4, "kernel_size": 3, "strides": 2}, (IMAGE,)),
    "Conv3DTranspose": ({"filters": 4, "kernel_size": 3}, (VOLUME,)),
    "DepthwiseConv1D": ({"kernel_size": 3}, (SERIES,)),
    "DepthwiseConv2D": ({"kernel_size": 3, "strides": 2}, (IMAGE,)),
    "SeparableConv1D": ({"filters": 4, "kernel_size": 3}, (SERIES,)),
    "SeparableConv2D": ({"filters": 4, "kernel_size": 3}, (IMAGE,)),
    **{f"{kind}Pooling{rank}D": ({"pool_size": 2}, (shape,)) for kind in ("Max", "Average")
       for rank, shape in ((1, SERIES), (2, IMAGE), (3, VOLUME))},
    **{f"Global{kind}Pooling{rank}D": ({}, (shape,)) for kind in ("Max", "Average")
       for rank, shape in ((1, SERIES), (2, IMAGE), (3, VOLUME))},
    **{f"Adaptive{kind}Pooling{rank}D": ({"output_size": 2}, (shape,))
       for kind in ("Max", "Average")
       for rank, shape in ((1, SERIES), (2, IMAGE), (3, VOLUME))},
    **{f"UpSampling{rank}D": ({"size": 2}, (shape,))
       for rank, shape in ((1, SERIES), (2, IMAGE), (3, VOLUME))},
    "UpSampling2D:bilinear": ({"size": 2, "interpolation": "bilinear"}, (IMAGE,)),
    **{f"ZeroPadding{rank}D": ({}, (shape,)) for rank, shape in ((1, SERIES), (2, IMAGE),
                                                                 (3, VOLUME))},
    **{f"Cropping{rank}D": ({}, (shape,)) for rank, shape in ((1, SERIES), (2, IMAGE),
                                                              (3, VOLUME))},
    **{name: ({}, (ROW, ROW)) for name in _names("""
        Add Average Concatenate Maximum Minimum Multiply Subtract""")},
    "Concatenate:series": ({"axis": 1}, (SERIES, SERIES)),
    "Dot": ({"axes": 1}, (ROW, ROW)),
    "Dot:series": ({"axes": 2}, (SERIES, SERIES)),
    "Attention": ({}, (SERIES, SERIES)),
    "Attention:scaled": ({"use_scale": True, "score_mode": "concat", "dropout": 0.2},
                         (SERIES, SERIES)),
    "AdditiveAttention": ({}, (SERIES, SERIES)),
    "MultiHeadAttention": ({"num_heads": 2, "key_dim": 3, "dropout": 0.1}, (SERIES, SERIES)),
    "GroupQueryAttention": ({"head_dim": 3, "num_query_heads": 4, "num_key_value_heads": 2},
                            (SERIES, SERIES)),
    "Reshape": ({"target_shape": (2, -1)}, (SERIES,)),
    "Permute": ({"dims": (2, 1)}, (SERIES,)),
    "RepeatVector": ({"n": 3}, (ROW,)),
    "TimeDistributed": ({"layer": ("Dense", {"units": 4})}, (SERIES,)),
    "TimeDistributed:conv": ({"layer": ("Conv2D", {"filters": 4, "kernel_size": 3})}, (FRAMES,)),
    **{name: ({"units": 4}, (SERIES,)) for name in ("SimpleRNN", "LSTM", "GRU")},
    "LSTM:sequences": ({"units": 4, "return_sequences": True, "dropout": 0.2,
                        "recurrent_dropout": 0.2}, (SERIES,)),
    "LSTM:unrolled": ({"units": 4, "unroll": True}, (SERIES,)),
    "GRU:before": ({"units": 4, "reset_after": False, "return_sequences": True}, (SERIES,)),
    "RNN": ({"cell": ("LSTMCell", {"units": 4})}, (SERIES,)),
    "Bidirectional": ({"layer": ("LSTM", {"units": 4, "return_sequences": True})}, (SERIES,)),
    "ConvLSTM1D": ({"filters": 2, "kernel_size": 3}, (SERIES + (2,),)),
    "ConvLSTM2D": ({"filters": 2, "kernel_size": 3}, (FRAMES,)),
    "Resizing": ({"height": 5, "width": 6}, (IMAGE,)),
    "Rescaling": ({"scale": 0.5}, (IMAGE,)),
    "CenterCrop": ({"height": 5, "width": 6}, (IMAGE,)),
    "Discretization": ({"bin_boundaries": [0.0, 1.0]}, (ROW,)),
    "RandomCrop": ({"height": 5, "width": 6}, (IMAGE,)),
    "RandomFlip": ({}, (IMAGE,)),
    "RandomTranslation": ({"height_factor": 0.2, "width_factor": 0.2}, (IMAGE,)),
    "RandomRotation": ({"factor": 0.2}, (IMAGE,)),
    "RandomZoom": ({"height_factor": 0.2}, (IMAGE,)),
    "RandomContrast": ({"factor": 0.2}, (IMAGE,)),
    "RandomBrightness": ({"factor": 0.2}, (IMAGE,)),
    "RandomGrayscale": ({}, (IMAGE,)),
    "RandomInvert": ({}, (IMAGE,)),
    "RandomHue": ({"factor": 0.2}, (IMAGE,)),
    "RandomSaturation": ({"factor": 0.2}, (IMAGE,)),
    "RandomPosterization": ({"factor": 4}, (IMAGE,)),
    "RandomSharpness": ({"factor": 0.2}, (IMAGE,)),
    "RandomShear": ({"x_factor": 0.2}, (IMAGE,)),
    "RandomErasing": ({}, (IMAGE,)),
    "RandomPerspective": ({}, (IMAGE,)),
    "RandomElasticTransform": ({}, (IMAGE,)),
    "RandomGaussianBlur": ({}, (IMAGE,)),
    "RandomColorJitter": ({}, (IMAGE,)),
    "Solarization": ({}, (IMAGE,)),
    "AutoContrast": ({}, (IMAGE,)),
    "Equalization": ({}, (IMAGE,)),
    "RandomWidth": ({"factor": 0.2}, (IMAGE,)),
    "RandomHeight": ({"factor": 0.2}, (IMAGE,)),
    "MelSpectrogram": ({"fft_length": 64, "num_mel_bins": 8, "sampling_rate": 800}, ((256,),)),
    "STFTSpectrogram": ({"frame_length": 32}, ((256, 1),)),
    "RandomFourierFeatures": ({"output_dim": 4}, (ROW,)),
    "LocallyConnected1D": ({"filters": 4, "kernel_size": 3}, (SERIES,)),
    "LocallyConnected2D": ({"filters": 4, "kernel_size": 3}, (IMAGE,)),
    "ThresholdedReLU": ({}, (ROW,)),
}
INTEGERS: dict[str, dict[str, Any]] = {
    "Embedding": {"input_dim": 9, "output_dim": 4},
    "Embedding:masked": {"input_dim": 9, "output_dim": 4, "mask_zero": True},
    "CategoryEncoding": {"num_tokens": 9},
    "CategoryEncoding:one_hot": {"num_tokens": 9, "output_mode": "one_hot"},
    "CategoryEncoding:count": {"num_tokens": 9, "output_mode": "count"},
    "IntegerLookup": {"vocabulary": [1, 2, 3]},
    "IntegerLookup:multi_hot": {"vocabulary": [1, 2, 3], "output_mode": "multi_hot"},
    "Hashing": {"num_bins": 5},
}
STRINGS: dict[str, dict[str, Any]] = {
    "StringLookup": {"vocabulary": ["a", "b"]},
    "StringLookup:count": {"vocabulary": ["a", "b"], "output_mode": "count"},
    "StringLookup:tf_idf": {"vocabulary": ["a", "b"], "output_mode": "tf_idf",
                            "idf_weights": [0.1, 0.2]},
    "TextVectorization": {"vocabulary": ["a", "b"], "output_sequence_length": 4},
    "TextVectorization:ragged": {"vocabulary": ["a", "b"], "output_mode": "multi_hot"},
    "HashedCrossing": {"num_bins": 5},
}


def layers(keras: Any) -> Iterator[tuple[str, Callable[[], Case]]]:
    for name, (arguments, shapes) in LAYERS.items():
        yield name, functools.partial(_layer, keras, name, arguments, [_rows(s) for s in shapes])
    for table, dtype in ((INTEGERS, tf.int64), (STRINGS, tf.string)):
        for name, arguments in table.items():
            shape = (1,) if name.startswith("Text") else ROW
            count = 2 if name == "HashedCrossing" else 1
            yield name, functools.partial(
                _layer, keras, name, arguments,
                [_rows(() if count == 2 else shape, dtype)] * count)


def _layer(keras: Any, title: str, arguments: Mapping[str, Any],
           inputs: Sequence[tf.TensorSpec]) -> Case:
    """A layer's output and the gradients of the mean of its squares."""
    made = {key: getattr(keras.layers, value[0])(**value[1]) if key in ("layer", "cell") else value
            for key, value in arguments.items()}
    layer = getattr(keras.layers, title.split(":")[0])(**made)

    def step(*tensors: tf.Tensor) -> Any:
        given = tensors[0] if len(tensors) == 1 else list(tensors)
        if title.startswith(("MultiHead", "GroupQuery")):
            given = None
        with tf.GradientTape() as tape:
            tape.watch([tensor for tensor in tensors if tensor.dtype.is_floating])
            training = {"training": True} if _takes_training(layer) else {}
            outputs = layer(*tensors, **training) if given is None else layer(given, **training)
            flat = [value for value in tf.nest.flatten(outputs) if isinstance(value, tf.Tensor)]
            losses = [tf.reduce_mean(value ** 2) for value in flat if value.dtype.is_floating]
            loss = tf.add_n([*losses, *layer.losses]) if losses else None
        sources = [*_plain(layer.trainable_variables),
                   *[tensor for tensor in tensors if tensor.dtype.is_floating]]
        return flat, [] if loss is None else [
            found for found in tape.gradient(loss, sources) if found is not None]

    _build(layer, title, inputs)
    return Case(step, inputs)


def _takes_training(layer: Any) -> bool:
    return "training" in layer.call.__code__.co_varnames if hasattr(
        layer.call, "__code__") else True


def _plain(variables: Sequence[Any]) -> list[tf.Variable]:
    return [variable if isinstance(variable, tf.Variable) else variable.value
            for variable in variables]


def _build(layer: Any, title: str, inputs: Sequence[tf.TensorSpec]) -> None:
    """Makes a layer's variables, by a call outside of what is traced."""
    tensors = [tf.zeros([2, *spec.shape[1:]], spec.dtype) if spec.dtype != tf.string
               else tf.fill([2, *spec.shape[1:]], "a") for spec in inputs]
    if title.startswith(("MultiHead", "GroupQuery")):
        layer(*tensors)
    else:
        layer(tensors[0] if len(tensors) == 1 else tensors)


# What is compiled: losses, metrics, optimizers, models.


def _trained(keras: Any, model: Any, x: Sequence[tf.TensorSpec], y: tf.TensorSpec,
             **compiled: Any) -> Case:
    """A training step of a model."""
    compiled.setdefault("optimizer", "sgd")
    compiled.setdefault("loss", "mse")
    model.compile(**compiled)
    model.optimizer.build(model.trainable_variables)
    tensors = [tf.zeros([2, *spec.shape[1:]], spec.dtype) for spec in (*x, y)]
    if compiled.get("metrics"):
        model.train_on_batch(_one_or_all(tensors[:-1]), tensors[-1])

    def step(*batch: tf.Tensor) -> Any:
        return model.train_step((_one_or_all(batch[:-1]), batch[-1]))

    return Case(step, [*x, y])


def _one_or_all(tensors: Sequence[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _mlp(keras: Any, units: int = 4, activation: str = "sigmoid") -> Any:
    return keras.Sequential([keras.Input(ROW), keras.layers.Dense(8, activation="relu"),
                             keras.layers.Dense(units, activation=activation)])


LOSSES = _names("""BinaryCrossentropy BinaryFocalCrossentropy CategoricalCrossentropy
    CategoricalHinge
    CategoricalFocalCrossentropy CosineSimilarity Dice Hinge Huber KLDivergence LogCosh
    MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError
    Poisson SquaredHinge Tversky CircleGeneralizedGap""")
SPARSE = ["SparseCategoricalCrossentropy", "CTC", "Circle"]
METRICS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _names("""
        Accuracy AUC BinaryAccuracy BinaryCrossentropy CategoricalAccuracy CategoricalCrossentropy
        CategoricalHinge CosineSimilarity F1Score FBetaScore FalseNegatives FalsePositives Hinge
        KLDivergence LogCoshError MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError
        MeanSquaredLogarithmicError Poisson Precision R2Score Recall
        RootMeanSquaredError SquaredHinge TopKCategoricalAccuracy TrueNegatives TruePositives
        PearsonCorrelation ConcordanceCorrelation""")},
    "AUC:labels": {"multi_label": True, "num_labels": 4},
    "AUC:pr": {"curve": "PR", "summation_method": "minoring"},
    "Precision:top_k": {"top_k": 2},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0, 4.0]},
    "OneHotMeanIoU": {"num_classes": 4},
    "BinaryIoU": {},
    "MeanIoU": {"num_classes": 4},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adadelta", "Adafactor", "Adagrad", "Adamax", "Ftrl", "Lamb",
              "Lion", "Muon", "Nadam", "RMSprop"]


def losses(keras: Any) -> Iterator[tuple[str, Callable[[], Case]]]:
    y = _rows((4,))
    for name in LOSSES:
        yield f"loss:{name}", lambda name=name: _trained(
            keras, _mlp(keras), [_rows(ROW)], y, loss=getattr(keras.losses, name)())
    yield "loss:SparseCategoricalCrossentropy", lambda: _trained(
        keras, _mlp(keras, activation="softmax"), [_rows(ROW)], _rows((), tf.int64),
        loss=keras.losses.SparseCategoricalCrossentropy())
    yield "loss:Circle", lambda: _trained(keras, _mlp(keras), [_rows(ROW)], _rows((), tf.int64),
                                          loss=keras.losses.Circle())
    yield "loss:CTC", lambda: _trained(
        keras, keras.Sequential([keras.Input(SERIES), keras.layers.Dense(5)]), [_rows(SERIES)],
        _rows((3,), tf.int32), loss=keras.losses.CTC())


def metrics(keras: Any) -> Iterator[tuple[str, Callable[[], Case]]]:
    for name, arguments in METRICS.items():
        yield f"metric:{name}", lambda name=name, arguments=arguments: _trained(
            keras, _mlp(keras), [_rows(ROW)], _rows((4,)),
            metrics=[getattr(keras.metrics, name.split(":")[0])(**arguments)])
    for name in ("SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy",
                 "SparseCategoricalCrossentropy"):
        yield f"metric:{name}", lambda name=name: _trained(
            keras, _mlp(keras), [_rows(ROW)], _rows((1,), tf.int64),
            loss="sparse_categorical_crossentropy", metrics=[getattr(keras.metrics, name)()])


def optimizers(keras: Any) -> Iterator[tuple[str, Callable[[], Case]]]:
    for name in OPTIMIZERS:
        yield f"optimizer:{name}", lambda name=name: _trained(
            keras, _mlp(keras), [_rows(ROW)], _rows((4,)),
            optimizer=getattr(keras.optimizers, name)(learning_rate=0.1, clipnorm=1.0))
    yield "optimizer:embedding", lambda: _trained(keras, keras.Sequential([
        keras.Input((6,), dtype="int64"), keras.layers.Embedding(9, 4),
        keras.layers.GlobalAveragePooling1D()]), [_rows((6,), tf.int64)], _rows((4,)),
        optimizer="adam")


def models(keras: Any) -> Iterator[tuple[str, Callable[[], Case]]]:
    yield "model:transformer", lambda: _transformer(keras)
    yield "model:masked_lstm", lambda: _trained(keras, keras.Sequential([
        keras.Input((6,), dtype="int64"), keras.layers.Embedding(9, 4, mask_zero=True),
        keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True)),
        keras.layers.GRU(3), keras.layers.Dense(4)]), [_rows((6,), tf.int64)], _rows((4,)))


def _transformer(keras: Any) -> Case:
    made = keras.layers
    x = keras.Input((6,), dtype="int64")
    h = made.Embedding(9, 8)(x)
    h = made.LayerNormalization()(h + made.MultiHeadAttention(2, 4, dropout=0.1)(
        h, h, use_causal_mask=True))
    h = made.LayerNormalization()(h + made.Dense(8)(made.Dense(16, activation="gelu")(h)))
    y = made.Dense(3, activation="softmax")(made.GlobalAveragePooling1D()(h))
    return _trained(keras, keras.Model(x, y), [_rows((6,), tf.int64)], _rows((), tf.int64),
                    loss="sparse_categorical_crossentropy", optimizer="adam",
                    metrics=["accuracy"])


BACKBONES = ["MobileNetV3Small", "EfficientNetB0", "ResNet50", "DenseNet121", "ConvNeXtTiny",
             "MobileNetV2", "EfficientNetV2B0", "InceptionV3", "Xception", "NASNetMobile", "VGG16"]


def backbones(keras: Any) -> Iterator[tuple[str, Callable[[], Case]]]:
    for name in BACKBONES:
        yield f"backbone:{name}", lambda name=name: _backbone(keras, name)


def _backbone(keras: Any, name: str) -> Case:
    size = (224, 224, 3) if name == "NASNetMobile" else (96, 96, 3)
    model = getattr(keras.applications, name)(weights=None, classes=4, input_shape=size)
    return _trained(keras, model, [_rows(size)], _rows((4,)), loss="categorical_crossentropy")


def cases(keras: Any) -> dict[str, Callable[[], Case]]:
    """All of them by name, for a Keras."""
    return dict(entry for family in (layers, losses, metrics, optimizers, models, backbones)
                for entry in family(keras))
