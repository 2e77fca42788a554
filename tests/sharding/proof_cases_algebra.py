"""Samples of matrices, transforms, normalization, cuDNN's layers, draws, segments, scatters, boxes.

Goes in: nothing.  Comes out: samples, see :mod:`proof_samples`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from proof_samples import around, case, real, whole

raw = tf.raw_ops


def _definite(*shape: int) -> np.ndarray:
    """Symmetric matrices with positive eigenvalues."""
    some = real(*shape, low=-1.0, high=1.0)
    return some @ some.swapaxes(-1, -2) + np.eye(shape[-1])


def _solved(matrix: tf.Tensor, columns: tf.Tensor) -> Any:
    """What is solved, and its gradients: a sum of them knows no more axes than those in front."""
    with tf.GradientTape() as tape:
        tape.watch([matrix, columns])
        found = tf.linalg.triangular_solve(matrix, columns)
        loss = tf.reduce_sum(found ** 2)
    return found, tape.gradient(loss, [matrix, columns])


def _diagonals() -> None:
    case("MatrixBandPart", real(6, 3, 6), 1, 0)
    case("MatrixDiag", real(6, 12))
    case("MatrixDiagV3", real(6, 2, 6), [0, 1], -1, -1, np.asarray(0.0))
    case("MatrixSetDiag", real(6, 3, 6), real(6, 3))
    for number in ("V2", "V3"):
        case(f"MatrixDiagPart{number}", real(6, 3, 6), 0, np.asarray(0.0))
        case(f"MatrixDiagPart{number}", real(6, 3, 6), [0, 1], np.asarray(0.0))
        case(f"MatrixSetDiag{number}", real(6, 3, 6), real(6, 3), 0)
        case(f"MatrixSetDiag{number}", real(6, 3, 6), real(6, 2, 3), [0, 1])
        for shape in ((6, 3), (6,), (12,)):
            case(f"MatrixDiag{number}", real(*shape), 0, -1, -1, np.asarray(2.0))
    for shape in ((12, 12), (12, 4), (4, 12), (6, 7), (7, 6)):
        case("MatrixDiagPartV3", real(*shape), 0, np.asarray(0.0))
        case("MatrixSetDiagV3", real(*shape), real(min(shape)), 0)
        for limits in ((1, 0), (-1, 2), (0, -1)):
            case("MatrixBandPart", real(*shape), *limits)
    case("MatrixDiagPartV3", real(6, 6), 1, np.asarray(0.0))
    case("MatrixSetDiagV3", real(12, 0), real(0), 0)
    case("MatrixSetDiagV3", real(0, 12), real(0), 0)


def _matrices() -> None:
    _diagonals()
    plain: dict[str, dict[str, Any]] = {
        "Cholesky": {}, "Eig": {"Tout": tf.complex128}, "LogMatrixDeterminant": {}, "Lu": {},
        "MatrixDeterminant": {}, "MatrixInverse": {}, "Qr": {}, "SelfAdjointEigV2": {}, "Svd": {},
        "MatrixDiagPart": {}}
    for type, attrs in plain.items():
        case(type, _definite(6, 3, 3), **attrs)
        case(type, _definite(2, 6, 6), **attrs)
    for type in ("MatrixLogarithm", "MatrixSquareRoot"):
        case(type, _definite(6, 3, 3).astype(np.complex128))
    for type in ("CholeskyGrad", "MatrixSolve", "MatrixTriangularSolve"):
        case(type, _definite(6, 3, 3), real(6, 3, 3))
        if type == "MatrixSolve":
            case(type, _definite(3, 6, 6), real(3, 6, 12))
        if type == "MatrixTriangularSolve":
            case(type, _definite(6, 3, 3), real(1, 3, 6))
            case(type, _definite(3, 3), real(6, 3, 2))
    case("MatrixSolveLs", real(6, 4, 3), real(6, 4, 2), np.asarray(0.1), fast=True)
    case("MatrixSolveLs", real(4, 3), real(4, 6), np.asarray(0.1), fast=True)
    case("TridiagonalSolve", real(6, 3, 4), real(6, 4, 2))
    case("TridiagonalSolve", real(2, 3, 4), real(2, 4, 12))
    case("MatrixTriangularSolve", _definite(4, 4), real(4, 12))
    for type in ("MatrixTriangularSolve", "Sum"):
        around(type, _solved, _definite(2, 3, 3), real(2, 3, 6))
    case("TridiagonalMatMul", *[real(6, 2, 1, 4)] * 3, real(6, 2, 4, 6))
    case("IsotonicRegression", real(6, 4), tf.float64)
    case("Cross", real(6, 2, 3), real(6, 2, 3))
    for type in ("LowerBound", "UpperBound"):
        case(type, np.sort(real(6, 12)), real(6, 12))
    for number in ("", "2D", "3D"):
        for shape in ((6, 4), (6, 12, 4), (6, 3, 6, 4)):
            if len(shape) < int(number[:1] or 1):
                continue
            length = list(shape[-int(number[:1] or 1):])
            case(f"FFT{number}", real(*shape).astype(np.complex128))
            case(f"IFFT{number}", real(*shape).astype(np.complex128))
            case(f"RFFT{number}", real(*shape), length, Tcomplex=tf.complex128)
            case(f"IRFFT{number}", real(*shape).astype(np.complex128), length, Treal=tf.float64)


def _normalization() -> None:
    def single(*shape: int) -> np.ndarray:
        return real(*shape, dtype=np.float32)

    image, scale, none = single(6, 3, 4, 2), single(2), np.zeros([0], np.float32)
    for version in ("", "V2", "V3"):
        for training in (True, False):
            moments = (none, none) if training else (single(2), single(2))
            around(f"FusedBatchNorm{version}", _outputs(
                f"FusedBatchNorm{version}", epsilon=0.01, is_training=training),
                image, scale, single(2), *moments, title=f"training {training}")
    around("FusedBatchNormV3", _outputs("FusedBatchNormV3", epsilon=0.01, is_training=True,
                                        exponential_avg_factor=0.5),
           image, scale, single(2), single(2), single(2), title="averaged")
    for format, shape in ("NCHW", (6, 2, 3, 4)), ("NCDHW", (6, 2, 3, 4, 3)):
        attrs, x = {"epsilon": 0.01, "is_training": True, "data_format": format}, single(*shape)
        around("FusedBatchNormV3", _outputs("FusedBatchNormV3", **attrs),
               x, scale, single(2), none, none, title=format)
        kept = [part.numpy() for part in raw.FusedBatchNormV3(
            x=x, scale=scale, offset=scale, mean=none, variance=none, data_format=format)[3:5]]
        around("FusedBatchNormGradV3", _outputs("FusedBatchNormGradV3", 3, **attrs),
               single(*shape), x, scale, *kept, none, title=format)
    for version in ("", "V2", "V3"):
        for training in (True, False):
            extra = (none,) if version == "V3" else ()
            kept = [part.numpy() for part in raw.FusedBatchNorm(
                x=image, scale=scale, offset=scale, mean=none, variance=none)[3:]]
            kept = kept if training else [single(2), single(2)]
            around(f"FusedBatchNormGrad{version}", _outputs(
                f"FusedBatchNormGrad{version}", 3, epsilon=0.01, is_training=training),
                single(6, 3, 4, 2), image, scale, *kept, *extra,
                title=f"training {training}")


def _turned(mode: str, time_major: bool) -> Any:
    """Outputs and last states of a recurrent layer, and its gradients."""
    def call(x: Any, h: Any, c: Any, params: Any, lengths: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, h, c, params])
            output, *states = raw.CudnnRNNV3(
                input=x, input_h=h, input_c=c if mode == "lstm" else 0.0, params=params,
                sequence_lengths=lengths, rnn_mode=mode, time_major=time_major)[:3]
            made = [output, *states[:1 + (mode == "lstm")]]
            loss = tf.add_n([tf.reduce_sum(each ** 2) for each in made])
        return made, tape.gradient(loss, [x, h, c, params][:4 if mode == "lstm" else 2])

    return call


def _recurrent() -> None:
    rows, time, width, units = 6, 4, 2, 3
    for mode, gates in (("lstm", 4), ("gru", 3)):
        params = real(gates * units * (width + units + 2), low=-1.0)
        for time_major in (True, False):
            x = real(*((time, rows) if time_major else (rows, time)), width, low=-1.0)
            state = (1, rows, units) if time_major else (rows, 1, units)
            for type in ("CudnnRNNV3", "CudnnRNNBackpropV3"):
                around(type, _turned(mode, time_major), x, real(*state), real(*state), params,
                       whole(rows, low=1, high=time + 1), title=f"{mode} {time_major}")


def _outputs(type: str, count: int = 3, **attrs: Any) -> Any:
    """The operation's outputs that mean something: the rest is the kernel's own."""
    import inspect

    names = list(inspect.signature(getattr(raw, type)).parameters)

    def call(*inputs: tf.Tensor) -> Any:
        return list(getattr(raw, type)(**dict(zip(names, inputs)), **attrs))[:count]

    return call


def _draws() -> None:
    key, counter = np.asarray([7], np.uint64), np.asarray([3, 9], np.uint64)

    def drawn(type: str, **attrs: Any) -> Any:
        def call(x: tf.Tensor) -> Any:
            return getattr(raw, type)(shape=tf.shape(x), key=tf.constant(key),
                                      counter=tf.constant(counter), alg=1, **attrs)
        return call

    def by_state(type: str, **attrs: Any) -> Any:
        return lambda x: getattr(raw, type)(shape=tf.shape(x), seed=1, seed2=2, **attrs)

    for shape in ((6, 3), (12, 4), (6, 12, 2), (3, 6)):
        for type in ("StatelessRandomNormalV2", "StatelessRandomUniformV2",
                     "StatelessTruncatedNormalV2"):
            around(type, drawn(type, dtype=tf.float64), real(*shape))
            around(type, drawn(type, dtype=tf.float32), real(*shape), title="single")
        around("StatelessRandomUniformFullIntV2", drawn("StatelessRandomUniformFullIntV2",
                                                        dtype=tf.int32), real(*shape))
        around("StatelessRandomUniformIntV2", drawn(
            "StatelessRandomUniformIntV2", minval=0, maxval=7), real(*shape))
    for type in ("RandomUniform", "RandomStandardNormal", "TruncatedNormal"):
        around(type, by_state(type, dtype=tf.float64), real(6, 3))
    around("RandomUniformInt", by_state("RandomUniformInt", minval=0, maxval=7), real(6, 3))
    pair = {"seed": [1, 2], "dtype": tf.float64}
    for type, inputs in (
            ("StatelessRandomGammaV3", lambda x: {
                "key": key, "counter": counter, "alg": 1, "alpha": x}),
            ("StatelessRandomPoisson", lambda x: {**pair, "lam": x}),
            ("StatelessRandomBinomial", lambda x: {**pair, "counts": x * 9, "probs": 1 / x}),
            ("StatelessParameterizedTruncatedNormal", lambda x: {
                "seed": [1, 2], "means": x, "stddevs": x, "minvals": x - 1, "maxvals": x + 1})):
        around(type, lambda x, type=type, inputs=inputs: getattr(raw, type)(
            shape=tf.shape(x), **inputs(tf.abs(x) + 1)), real(6, 3))
    for shape in ((6, 3), (12,), (3, 6)):
        case("RandomShuffle", real(*shape), seed=1, seed2=2)
        if len(shape) == 2:
            case("Multinomial", real(*shape), 3, seed=1, seed2=2)
            case("StatelessMultinomial", real(*shape), 3, [1, 2])


def _segments() -> None:
    for kind in ("Sum", "Mean", "Max", "Min", "Prod"):
        case(f"Segment{kind}", real(6, 4), [0, 0, 1, 1, 1, 2])
        case(f"Segment{kind}", real(4, 6), [0, 0, 1, 2])
        if kind != "Mean":
            case(f"UnsortedSegment{kind}", real(4, 12), whole(4), 4)
            case(f"UnsortedSegment{kind}", real(6, 12), whole(6), 4)
    for kind in ("Sum", "Mean", "SqrtN"):
        case(f"SparseSegment{kind}", real(6, 4), [0, 2, 5, 1], [0, 0, 1, 1])
        case(f"SparseSegment{kind}", real(4, 6), [0, 2, 3, 1], [0, 0, 1, 1])
    for kind in ("Add", "Max", "Min", "Sub", "Update"):
        places = np.asarray([[1], [0], [3], [2], [5], [4]], np.int32)
        case(f"TensorScatter{kind}", real(7, 4), places, real(6, 4))
        case(f"TensorScatter{kind}", real(4, 6), [[1], [0]], real(2, 6))
        case(f"TensorScatter{kind}", real(6, 4), [[1], [0]], real(2, 4))
    around("ResourceGatherNd", _entries_of_variable, whole(6, 2))
    for start in ([0, 1], [3, 1], [1, 0]):
        for shape in ((6, 2), (4, 4), (1, 4)):
            around("XlaDynamicUpdateSlice", lambda x, part, start=start: keras.ops.slice_update(
                x, start, part), real(6, 4), real(*shape), title=str(start))


def _entries_of_variable(indices: tf.Tensor) -> tf.Tensor:
    handle = raw.VarHandleOp(dtype=tf.float64, shape=[4, 5], shared_name="gathered")
    table = tf.constant(np.arange(20.0).reshape(4, 5) / 7)
    with tf.control_dependencies([raw.AssignVariableOp(resource=handle, value=table)]):
        return raw.ResourceGatherNd(resource=handle, indices=indices, dtype=tf.float64)


def _tables() -> None:
    def found(keys: tf.Tensor) -> tf.Tensor:
        table = raw.HashTableV2(key_dtype=tf.int64, value_dtype=tf.float32, shared_name="table")
        with tf.control_dependencies([raw.LookupTableImportV2(
                table_handle=table, keys=tf.range(3, dtype=tf.int64), values=[5.0, 6.0, 7.0])]):
            return raw.LookupTableFindV2(table_handle=table, keys=keys, default_value=-1.0)

    around("LookupTableFindV2", found, whole(6, 12, dtype=np.int64))


def _boxes() -> None:
    def single(*shape: int) -> np.ndarray:
        return real(*shape, dtype=np.float32)

    image, corners = single(6, 4, 6, 3), np.sort(single(6, 2, 2, 2), 2).reshape(6, 2, 4)
    case("CropAndResize", single(3, 4, 5, 2), corners[:, 0], whole(6, high=3), [2, 3])
    case("DrawBoundingBoxes", image, corners)
    case("DrawBoundingBoxesV2", image, corners, single(2, 3))
    case("CombinedNonMaxSuppression", corners[:, :, None], single(6, 2, 2), 2, 3, 0.5, 0.1)
    steps: dict[str, Any] = {"strides": [1] * 4, "rates": [1] * 4, "padding": "VALID"}
    case("Dilation2DBackpropInput", image, single(2, 2, 3), single(6, 3, 5, 3), **steps)
    case("Dilation2DBackpropFilter", image, single(2, 2, 3), single(6, 3, 5, 3), **steps)
    case("ExtractGlimpseV2", image, [2, 2], single(6, 2), noise="zero", uniform_noise=False)
    shift = np.tile(np.asarray([1, 0, 1, 0, 1, 0, 0, 0], np.float32), [6, 1])
    for turn in (shift, shift[:1]):
        case("ImageProjectiveTransformV2", image, turn, [4, 6], interpolation="BILINEAR")
        case("ImageProjectiveTransformV3", image, turn, [4, 6], 0.0, interpolation="BILINEAR")
    case("ScaleAndTranslate", image, [3, 5], [0.7, 0.8], [0.0, 1.0])
    case("ScaleAndTranslateGrad", single(6, 3, 5, 3), image, [0.7, 0.8], [0.0, 1.0])
    window: dict[str, Any] = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    pooled, places = (part.numpy() for part in raw.MaxPoolWithArgmax(input=image, **window))
    case("MaxPoolGradV2", image, pooled, pooled, [1, 2, 2, 1], [1, 2, 2, 1], padding="VALID")
    for numbered in (True, False):
        case("MaxPoolWithArgmax", image, include_batch_in_index=numbered, **window)
    case("MaxPoolGradWithArgmax", image, pooled, places, **window)


for _fill in (_matrices, _normalization, _recurrent, _draws, _segments, _tables, _boxes):
    _fill()
