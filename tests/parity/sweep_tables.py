"""What the sweep knows of single classes: arguments, data, exceptions.

Goes in: nothing.  Comes out: tables by the name of a class of ``keras.layers``, ``losses`` or
``metrics``.  A class that is in none of them is made with :data:`PARAMETERS` for what its
constructor asks for, and gets the data that its name suggests: most new classes need no entry.

A key may have words behind the class, as in ``"BatchNormalization synchronized"``: a second item of
the same class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

Arguments = Callable[[Any], Mapping[str, Any]] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Layer:
    """How a layer is used.

    Attributes:
      data: a name of ``sweep_cases.INPUTS``.
      arguments: of the constructor, or a function of the Keras module that gives them.
      given: how the layer is called: with ``one`` tensor, a ``list`` of two, ``two``, or with a
        ``named`` one.
      after: a layer behind it, made from the Keras module.
      wrap: what is made of the layer, as a recurrent layer of a cell.
    """

    data: str = ""
    arguments: Arguments = dataclasses.field(default_factory=dict)
    given: str = "one"
    after: Callable[[Any], Any] | None = None
    wrap: Callable[[Any, Any], Any] = lambda keras, layer: layer


# What constructors ask for by these names.  Layers that draw at random draw nothing with a 0.
PARAMETERS = {
    "units": 4, "filters": 3, "kernel_size": 2, "pool_size": 2, "output_size": 2, "n": 3,
    "activation": "tanh", "scale": 0.5, "num_bins": 5, "input_dim": 11, "output_dim": 3,
    "num_classes": 3, "target_class_ids": (0, 2), "normalizer": 1.5,
    "recall": 0.5, "precision": 0.5, "specificity": 0.5, "sensitivity": 0.5}
# And these also where they have a default.
ALWAYS = {"rate": 0.0, "stddev": 0.0, "factor": 0.0, "height_factor": 0.0, "width_factor": 0.0,
          "height": 6, "width": 6}

WORDS = ["some", "words", "of", "all"]


def _dense(keras: Any) -> dict[str, Any]:
    return {"layer": keras.layers.Dense(3, activation="tanh")}


def _recurrent(keras: Any, cell: Any) -> Any:
    return keras.layers.RNN(cell)


def _cell(keras: Any) -> dict[str, Any]:
    return {"cell": keras.layers.SimpleRNNCell(3)}


def _feature_columns(keras: Any) -> dict[str, Any]:
    return {"feature_columns": [tf.feature_column.numeric_column("numbers", [6])]}


_QUARTERS = np.linspace(0.1, 0.6, 6).astype("float32")
_TWO = Layer("features", given="list")
_QUERIES = Layer("steps", given="list")
_RGB = Layer("rgb")

LAYERS: dict[str, Layer] = {
    # Of two tensors.
    **dict.fromkeys(("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply",
                     "Subtract"), _TWO),
    "Dot": Layer("features", {"axes": 1}, "list"),
    "Attention": _QUERIES,
    "AdditiveAttention": _QUERIES,
    # A key's bias has a gradient of zero in theory.
    "MultiHeadAttention": Layer(
        "steps", {"num_heads": 2, "key_dim": 2, "use_bias": False}, "two"),
    "GroupQueryAttention": Layer("steps", {
        "head_dim": 2, "num_query_heads": 4, "num_key_value_heads": 2, "use_bias": False}, "two"),
    # Of other layers.
    "Bidirectional": Layer("steps", lambda keras: {"layer": keras.layers.SimpleRNN(3)}),
    "TimeDistributed": Layer("steps", _dense),
    "SpectralNormalization": Layer("features", _dense),
    "Pipeline": Layer("features", lambda keras: {"layers": [keras.layers.Rescaling(0.5)]}),
    "GRUCell": Layer("steps", wrap=_recurrent),
    "LSTMCell": Layer("steps", wrap=_recurrent),
    "SimpleRNNCell": Layer("steps", wrap=_recurrent),
    "StackedRNNCells": Layer("steps", lambda keras: {"cells": [
        keras.layers.GRUCell(3), keras.layers.LSTMCell(2)]}, wrap=_recurrent),
    "RNN": Layer("steps", _cell),
    # Of sequences, pictures and films.
    "GRU": Layer("steps"),
    "LSTM": Layer("steps"),
    "SimpleRNN": Layer("steps"),
    "Masking": Layer("steps", {"mask_value": 1.0}, after=lambda keras: keras.layers.GRU(3)),
    "ConvLSTM1D": Layer("images"),
    "ConvLSTM2D": Layer("films"),
    "ConvLSTM3D": Layer("films of volumes"),
    "GroupNormalization": Layer("images", {"groups": 1}),
    "BatchNormalization": Layer("features"),
    "BatchNormalization synchronized": Layer("images", {"synchronized": True}),
    "Flatten": Layer("images"),
    "Permute": Layer("steps", {"dims": (2, 1)}),
    "Reshape": Layer("features", {"target_shape": (3, 2)}),
    "UpSampling2D bilinear": Layer("images", {"interpolation": "bilinear"}),
    "EinsumDense": Layer("features", {"equation": "ab,bc->ac", "output_shape": (3,)}),
    "Lambda": Layer("features", {"function": tf.square}),
    "ActivityRegularization": Layer("features", {"l1": 0.01, "l2": 0.1}),
    "MelSpectrogram": Layer("sounds", {"fft_length": 16, "sequence_stride": 8, "num_mel_bins": 4,
                                       "sampling_rate": 100}),
    "STFTSpectrogram": Layer("sounds of a channel", {"frame_length": 16, "expand_dims": False}),
    # Of ids and words.
    "Embedding": Layer("ids"),
    "ReversibleEmbedding": Layer("ids"),
    "CategoryEncoding": Layer("ids", {"num_tokens": 11}),
    "HashedCrossing": Layer("pairs of ids", given="list"),
    "Hashing": Layer("ids"),
    "IntegerLookup": Layer("ids", {"vocabulary": [1, 2, 5, 7]}),
    "StringLookup": Layer("words", {"vocabulary": WORDS}),
    "TextVectorization": Layer("sentences", {"vocabulary": WORDS, "output_sequence_length": 4}),
    "Discretization": Layer("raw features", {"bin_boundaries": [-0.5, 0.0, 0.5]}),
    "Normalization": Layer("features", {"mean": _QUARTERS, "variance": 2 * _QUARTERS}),
    "DenseFeatures": Layer("features", _feature_columns, "named"),
    "RandomFourierFeatures": Layer("features"),
    # Of pictures of three colours, 0 to 255.
    **dict.fromkeys(("AutoContrast", "Equalization", "Resizing",
                     "ContrastLimitedAdaptiveHistogramEqualization"), _RGB),
    "CenterCrop": Layer("rgb", {"height": 4, "width": 4}),
    "Resizing smaller": Layer("rgb", {"height": 4, "width": 3}),
    "CenterCrop resizing": Layer("rgb", {"height": 8, "width": 8}),
    "RandomContrast": Layer("rgb", {"factor": 1e-12}),  # tf_keras takes no 0
    "RandomColorJitter": Layer("rgb", {"brightness_factor": 0.0, "contrast_factor": 0.0,
                                       "saturation_factor": 0.0, "hue_factor": 0.0}),
    "RandomPosterization": Layer("rgb", {"factor": (3, 3)}),
    "AugMix": _RGB, "CutMix": _RGB, "MixUp": _RGB, "RandAugment": _RGB, "Solarization": _RGB,
    **dict.fromkeys(("Dropout drawing", "AlphaDropout drawing", "GaussianDropout drawing"),
                    Layer("features", {"rate": 0.3})),
    "GaussianNoise drawing": Layer("features", {"stddev": 0.3}),
}


@dataclasses.dataclass(frozen=True)
class Targets:
    """What a loss or a metric is given.

    Attributes:
      data: a name of ``sweep_cases.TARGETS``.
      arguments: of the constructor.
      unweighted_in: a Keras version whose own code fails with sample weights, on one device too.
    """

    data: str = "numbers"
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unweighted_in: str = ""


# By the beginning of a class' name, the first that fits; else "numbers".
TARGETS = {
    "Binary": "yes or no", "SparseCategorical": "labels", "SparseTopK": "labels",
    "Categorical": "one hot", "TopK": "one hot", "KLDivergence": "one hot", "Poisson": "positive",
    "MeanSquaredLogarithmic": "positive", "MeanAbsolutePercentage": "positive",
    "CategoricalHinge": "one hot", "Hinge": "signs", "SquaredHinge": "signs",
    "False": "yes or no", "True": "yes or no", "Precision": "yes or no", "Recall": "yes or no",
    "Sensitivity": "yes or no", "Specificity": "yes or no", "AUC": "yes or no",
    "F1": "one hot", "FBeta": "one hot", "OneHot": "one hot", "Dice": "masks", "Tversky": "masks"}

LOSSES: dict[str, Targets] = {
    "CTC": Targets("transcripts"),
    "CategoricalGeneralizedCrossEntropy": Targets("labels"),
    "Circle": Targets("identities", {"gamma": 1.0}),
    "Dice axis": Targets("masks", {"axis": (1, 2)}),
    "Tversky axis": Targets("masks", {"axis": (1, 2)}),
    "SparseCategoricalCrossentropy ignoring": Targets("labels", {"ignore_class": 0}),
    "BinaryFocalCrossentropy balanced": Targets("yes or no", {"apply_class_balancing": True}),
}

METRICS: dict[str, Targets] = {
    "Accuracy": Targets("rounded"),
    "F1Score": Targets("one hot", unweighted_in="tf_keras"),
    "FBetaScore": Targets("one hot", unweighted_in="tf_keras"),
    "IoU": Targets("labels", {"sparse_y_pred": False}),
    "MeanIoU": Targets("labels", {"sparse_y_pred": False}),
    "MeanMetricWrapper": Targets("numbers", {
        "fn": lambda y_true, y_pred: tf.reduce_mean(tf.abs(y_true - y_pred), -1)}),
    "MeanRelativeError": Targets("numbers", {"normalizer": [1.0, 2.0, 3.0]}),
    "AUC several": Targets("one hot", {"multi_label": True, "num_labels": 3}),
    "AUC precision recall": Targets("yes or no", {"curve": "PR", "num_thresholds": 20}),
    "Precision top": Targets("one hot", {"top_k": 1}),
    "TopKCategoricalAccuracy": Targets("one hot", {"k": 2}),
    "SparseTopKCategoricalAccuracy": Targets("labels", {"k": 2}),
}

_BASE = "a base class, which its subclasses stand for"
_PER_WORKER = "keeps a table a worker of a ParameterServerStrategy"
_OTHER_LIBRARY = "wraps a module of a library that TensorFlow does not train"

# Classes that cannot be trained in a fit, and why.
CANNOT: dict[str, str] = {
    "layers.Layer": _BASE,
    "layers.Wrapper": _BASE,
    "layers.AbstractRNNCell": _BASE,
    "layers.InputLayer": "part of every model here",
    "layers.FlaxLayer": _OTHER_LIBRARY,
    "layers.JaxLayer": _OTHER_LIBRARY,
    "layers.TorchModuleWrapper": _OTHER_LIBRARY,
    "layers.TFSMLayer": "needs a SavedModel in a file, and does not train it",
    "layers.MaxNumBoundingBoxes": "works on dictionaries of boxes in a tf.data pipeline",
    "layers.DynamicEmbedding": _PER_WORKER,
    "layers.DynamicLookup": _PER_WORKER,
    "metrics.MeanTensor": "keeps a mean for each entry, so all batches need the same shape",
    "losses.Loss": _BASE,
    "metrics.Metric": _BASE,
    "metrics.PyMetric": _BASE,
}

# Where float32 is ill conditioned; these are compared in float64.
FLOAT64: dict[str, str] = {
    "layers.STFTSpectrogram": "takes logarithms of numbers that may be close to zero",
    "metrics.ConcordanceCorrelation": "divides by differences of means of three numbers",
    "metrics.PearsonCorrelation": "divides by differences of means of three numbers",
}

# What is known to differ from one device, by Keras version or "" for both, and why.  A loss is
# listed with all its reductions, or with one of its items.
DIFFERS: dict[tuple[str, str], str] = {
    ("keras", "layers.AugMix"): "Python's random numbers choose its layers each time it is traced",
}
