"""Samples of operations on entries, contractions, operations on images, and reductions.

Goes in: nothing.  Comes out: samples, see :mod:`proof_samples`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from proof_samples import around, case, flags, random, real, whole

from towerstrategy.sharding.rules import families

raw = tf.raw_ops


def _elementwise() -> None:
    signed = {"low": -2.0, "high": 2.0}
    everywhere = {
        "Abs", "Atan", "Asinh", "Ceil", "Cos", "Cosh", "Elu", "Erf", "Erfc", "Exp", "Floor",
        "LeakyRelu", "Neg", "Relu", "Relu6", "Rint", "Round", "Selu", "Sigmoid", "Sign", "Sin",
        "Sinh", "Softplus", "Softsign", "Square", "Tan", "Tanh", "Identity", "OnesLike",
        "ZerosLike", "Expm1", "CheckNumerics", "CheckNumericsV2", "Snapshot", "PreventGradient",
        "StopGradient", "IsNan", "IsInf", "IsFinite"}
    messages = {"CheckNumerics": {"message": ""}, "CheckNumericsV2": {"message": ""}}
    for type in families.UNARY:
        if type in _OTHER_UNARY:
            _OTHER_UNARY[type](type)
            continue
        domain = signed if type in everywhere else {}
        domain = {"low": 1.1, "high": 3.0} if type == "Acosh" else domain
        for array in (real(6, 4, **domain), real(3, 12, **domain)):
            case(type, array, **messages.get(type, {}))
    for type in families.BINARY:
        if type in _OTHER_BINARY:
            _OTHER_BINARY[type](type)
        else:
            _two(type, lambda *shape: real(*shape))


def _quantized() -> None:
    def single(*shape: int) -> np.ndarray:
        return real(*shape, low=-1.0, dtype=np.float32)

    for channels, where in (([], "Vars"), ([6], "VarsPerChannel")):
        low, high = np.full(channels, -0.5, np.float32), np.full(channels, 0.4, np.float32)
        for shape in ((6, 6), (12, 2, 3, 6)):
            case(f"FakeQuantWithMinMax{where}", single(*shape), low, high)
            case(f"FakeQuantWithMinMax{where}Gradient", single(*shape), single(*shape), low, high)


def _two(type: str, make: Callable[..., np.ndarray], second: Any = None) -> None:
    """Operands of one shape, and such as are broadcast."""
    second = second or make
    case(type, make(6, 4), second(6, 4))
    try:  # only where the operation broadcasts
        getattr(raw, type)(
            **dict(zip(inspect.signature(getattr(raw, type)).parameters, (make(6, 4), second(4))))
        )
    except (tf.errors.InvalidArgumentError, ValueError):
        return
    case(type, make(6, 1), second(6))
    if type in ("AddV2", "Mul", "RealDiv", "Sub", "LogicalAnd", "BitwiseOr", "Maximum", "Greater"):
        case(type, make(6, 4), second(4))
        case(type, make(12, 4), second(1, 4))
        case(type, make(6, 12), second(6, 12))
        case(type, make(), second(6, 1, 3))
        case(type, make(2, 6, 1), second(6, 1))


def _integers(low: int = 0, high: int = 5) -> Callable[[str], None]:
    return lambda type: _two(
        type, lambda *s: whole(*s, low=low, high=high), lambda *s: whole(*s, low=1, high=4)
    )


def _each(*arrays: Callable[[], np.ndarray], **attrs: Any) -> Callable[[str], None]:
    return lambda type: [case(type, make(), **attrs) for make in arrays]  # type: ignore


def _complex(*shape: int) -> np.ndarray:
    return real(*shape) + 1j * real(*shape)


def _casts(type: str) -> None:
    for source, targets in (
        (real(6, 4, low=-3, high=3), (tf.float32, tf.int32, tf.bool, tf.float16)),
        (whole(6, 4, high=3), (tf.float32, tf.bool, tf.int8)),
        (flags(6, 4), (tf.float64,)),
        (_complex(6, 2), (tf.float64,)),
        (np.asarray(6, np.int32), (tf.float32, tf.int64)),
        (np.asarray(258, np.int32), (tf.int8,)),
    ):
        for target in targets:
            case(type, source, DstT=target)


def _numbers(type: str) -> None:
    """A function of integers, a number of rows among them."""
    case(type, np.asarray(12, np.int32))
    case(type, np.asarray([4, 6, 2], np.int64))


def _copies(type: str) -> None:
    case(type, real(6, 4, low=-1.0))
    case(type, real(3, 12))
    case(type, flags(6))
    _numbers(type)


def _three(type: str) -> None:
    case(type, real(6, 2), real(6, 2), real(6, 2))


def _clips(type: str) -> None:
    case(type, real(6, 2), 0.3, 0.6)
    case(type, real(6, 2), real(6, 2, high=0.3), real(6, 2, low=0.5))


def _choices(type: str) -> None:
    case(type, flags(6, 4), real(6, 4), real(6, 4))
    case(type, flags(6, 1), real(4), real(6, 1))
    case(type, flags(1), real(6, 6), real(1, 6))
    if type == "SelectV2":
        case(type, np.asarray(True), real(6, 4), real(6, 4))


def _sums(type: str) -> None:
    case(type, [real(6, 4), real(6, 4), real(6, 4)])
    case(type, [real(12)])
    case(type, [np.asarray(6, np.int32), np.asarray(12, np.int32)])


def _counted(type: str) -> None:
    """What arithmetic makes of numbers of rows."""
    _two(type, lambda *s: real(*s))
    for first, second in (
        (np.asarray(6, np.int32), 5),
        (5, np.asarray(12, np.int32)),
        (np.asarray(6, np.int32), np.asarray(12, np.int32)),
        (np.asarray(6, np.int32), np.asarray([6, 3, 12], np.int32)),
        (np.asarray(6, np.int32), np.asarray(6, np.int32)),
        (np.asarray([6, 4], np.int32), np.asarray([6, 2], np.int32)),
        (np.asarray([6, 4], np.int32), [0, 2]),
        (np.asarray([3, 6], np.int32), 2),
        (np.asarray(6, np.int32), -1),
    ):
        case(type, first, second)


def _text(*shape: int) -> np.ndarray:
    words = np.asarray(["a b", "Some", " words", "", "xyz", "a"], object)
    return words[random.integers(0, len(words), shape)]


_DIGITS = np.asarray(["1", "2.5", "-3", "0", "7", "1e3"], object)
_CODES = np.asarray(["YQ", "YmM", "", "eHl6", "YQ", "YmM"], object)
_INT = _each(lambda: whole(6, 4), lambda: whole(3, 12))
_OTHER_UNARY: dict[str, Callable[[str], None]] = {
    "Cast": _casts,
    "Identity": _copies,
    "Snapshot": _copies,
    "StopGradient": _copies,
    "Neg": lambda type: (_numbers(type), case(type, real(6, 4, low=-1.0))),  # type: ignore
    "Square": lambda type: (_numbers(type), case(type, real(6, 4, low=-1.0))),  # type: ignore
    "Angle": _each(lambda: _complex(6, 2), Tout=tf.float64),
    "Bitcast": lambda type: (
        [
            case(type, real(6, 12), type=to)  # type: ignore
            for to in (tf.int64, tf.int32)
        ]
        + [
            case(type, whole(12, 6, 2), type=tf.int64),
            case(type, whole(4, 12, high=9), type=tf.float32),
        ]
    ),
    "ComplexAbs": _each(lambda: _complex(6, 2), Tout=tf.float64),
    "Conj": _each(lambda: _complex(6, 2)),
    "Real": _each(lambda: _complex(6, 2), Tout=tf.float64),
    "Imag": _each(lambda: _complex(6, 2), Tout=tf.float64),
    "Invert": _INT,
    "PopulationCount": _INT,
    "LogicalNot": _each(lambda: flags(6, 4)),
    "DebugIdentityV2": _each(lambda: real(6, 4)),
    "Bucketize": _each(lambda: real(6, 4), boundaries=[0.3, 0.5]),
    "FakeQuantWithMinMaxArgs": _each(lambda: real(6, 4, dtype=np.float32)),
    "AsString": _each(lambda: whole(6, 4)),
    "DecodeBase64": _each(lambda: _CODES),
    "EncodeBase64": _each(lambda: _text(6, 2)),
    "StringLength": _each(lambda: _text(6, 2)),
    "StringLower": _each(lambda: _text(6)),
    "StringUpper": _each(lambda: _text(6)),
    "StringStrip": _each(lambda: _text(12)),
    "StringToHashBucketFast": _each(lambda: _text(6, 2), num_buckets=7),
    "StringToHashBucket": _each(lambda: _text(6), num_buckets=7),
    "StringToHashBucketStrong": _each(lambda: _text(6), num_buckets=7, key=[1, 2]),
    "StringToNumber": _each(lambda: _DIGITS),
    "RegexFullMatch": lambda type: case(type, _text(6, 2), "a.*"),
    "RegexReplace": lambda type: case(type, _text(6), "[a-m]", "-"),
    "StaticRegexFullMatch": _each(lambda: _text(6), pattern="a.*"),
    "StaticRegexReplace": _each(lambda: _text(6), pattern="a", rewrite="b"),
}
_OTHER_BINARY: dict[str, Callable[[str], None]] = {
    "AddN": _sums,
    "AddV2": _counted,
    "Mul": _counted,
    "Sub": _counted,
    "Maximum": _counted,
    "FloorDiv": _counted,
    "RealDiv": _counted,
    "Minimum": _counted,
    "Betainc": _three,
    "ClipByValue": _clips,
    "SelectV2": _choices,
    "BitwiseAnd": _integers(),
    "BitwiseOr": _integers(),
    "BitwiseXor": _integers(),
    "LeftShift": _integers(),
    "RightShift": _integers(),
    "TruncateDiv": _integers(-5),
    "TruncateMod": _integers(-5),
    "Mod": _integers(-5),
    "LogicalAnd": lambda type: _two(type, flags),
    "LogicalOr": lambda type: _two(type, flags),
    "Complex": lambda type: [
        case(type, real(6, 4), real(*shape), Tout=tf.complex128)  # type: ignore
        for shape in ((6, 4), (4,), (6, 1))
    ],
    "Substr": lambda type: (
        case(type, _text(6), 0, 0),  # type: ignore
        case(type, _text(6), whole(6, high=1), whole(6)),
    ),
    "FakeQuantWithMinMaxArgsGradient": lambda type: _two(
        type, lambda *s: real(*s, dtype=np.float32)
    ),
    "Polygamma": lambda type: [
        case(type, order, real(6, 4))  # type: ignore
        for order in (np.asarray(2.0), np.asarray([2.0, 1.0, 3.0, 2.0]))
    ],
    "RandomGammaGrad": lambda type: _two(type, lambda *s: real(*s, low=1, high=4)),
    "Zeta": lambda type: _two(type, lambda *s: real(*s, low=1.5, high=4), lambda *s: real(*s)),
}


def _contractions() -> None:
    for first, second, turned in (
        ((6, 4), (4, 6), (False, False)),
        ((4, 6), (4, 12), (True, False)),
        ((6, 4), (12, 4), (False, True)),
        ((4, 6), (3, 4), (True, True)),
        ((12, 6), (6, 6), (False, False)),
        ((4, 12), (12, 5), (False, False)),
    ):
        case("MatMul", real(*first), real(*second), transpose_a=turned[0], transpose_b=turned[1])
    case("MatMul", real(6, 12, dtype=np.float32), real(12, 4, dtype=np.float32))
    around("MatMul", lambda a, b: raw.MatMul(a=a, b=raw.PlaceholderWithDefault(
        input=b, shape=tf.TensorShape(None))), real(6, 3), real(3, 4), title="of unknown rank")
    for type in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        case(
            type, real(6, 4, 3), real(6, 3, 2), **({"Tout": tf.float64} if type[-1] == "3" else {})
        )
        case(
            type,
            real(6, 12, 3),
            real(6, 12, 2),
            adj_x=True,
            **({"Tout": tf.float64} if type[-1] == "3" else {}),
        )
    for first, second in (((6, 4, 3), (3, 6)), ((2, 1, 6, 6), (6, 6, 3)), ((1, 4, 6), (6, 6, 12))):
        case("BatchMatMulV2", real(*first), real(*second))
    for equation, first, second in (
        ("ab,bc->ac", (6, 4), (4, 12)),
        ("abc,cd->abd", (6, 12, 3), (3, 6)),
        ("aecd,abcd->acbe", (6, 3, 2, 4), (6, 12, 2, 4)),
        ("abc,abd->dc", (6, 2, 3), (6, 2, 4)),
        ("a,b->ab", (6,), (12,)),
        ("a,a->", (12,), (12,)),
        ("...b,bc->...c", (6, 12, 2), (2, 6)),
        ("...n,d->...nd", (6, 2), (6,)),
        ("a...b,...bc->a...c", (6, 1, 2), (12, 2, 3)),
        ("...ab,...cb->...ac", (6, 4, 3), (1, 12, 3)),
    ):
        case("Einsum", [real(*first), real(*second)], equation=equation)
    for equation, shape in (
        ("aab->ab", (6, 6, 2)),
        ("aa->", (6, 6)),
        ("ab->ba", (6, 12)),
        ("a->aa", (6,)),
        ("...b->b...", (6, 4)),
        ("ab->b", (6, 12)),
        ("ab->", (6, 4)),
    ):
        case("Einsum", [real(*shape)], equation=equation)
    _convolutions()
    _images()


def _convolutions() -> None:
    steps, steps3 = [1, 1, 1, 1], [1] * 5
    image, kernel, out = real(6, 5, 6, 3), real(2, 2, 3, 6), real(6, 4, 5, 6)
    case("Conv2D", image, kernel, strides=steps, padding="VALID")
    case("Conv2D", image, kernel, strides=[1, 2, 2, 1], padding="SAME")
    case("Conv2D", image, real(2, 2, 1, 6), strides=steps, padding="VALID")
    sizes = [6, 5, 6, 3]
    for shape in (np.asarray(sizes, np.int32), sizes, np.asarray(sizes[1:3], np.int32)):
        case("Conv2DBackpropInput", shape, kernel, out, strides=steps, padding="VALID")
    around(
        "Conv2DBackpropInput",
        lambda x, k, d: raw.Conv2DBackpropInput(
            input_sizes=tf.shape(x), filter=k, out_backprop=d, strides=steps, padding="VALID"
        ),
        image,
        kernel,
        out,
    )
    case("Conv2DBackpropFilter", image, [2, 2, 3, 6], out, strides=steps, padding="VALID")
    case("DepthwiseConv2dNative", image, real(2, 2, 3, 2), strides=steps, padding="VALID")
    deep = real(6, 4, 5, 6)
    case(
        "DepthwiseConv2dNativeBackpropInput", np.asarray(sizes, np.int32), real(2, 2, 3, 2), deep,
        strides=steps, padding="VALID")
    case(
        "DepthwiseConv2dNativeBackpropFilter", image, [2, 2, 3, 2], deep, strides=steps,
        padding="VALID")
    box = real(6, 3, 3, 3, 2)
    case("Conv3D", box, real(2, 2, 2, 2, 4), strides=steps3, padding="VALID")
    case(
        "Conv3DBackpropInputV2", np.asarray([6, 3, 3, 3, 2], np.int32), real(2, 2, 2, 2, 4),
        real(6, 2, 2, 2, 4), strides=steps3, padding="VALID")
    case(
        "Conv3DBackpropFilterV2", box, [2, 2, 2, 2, 4], real(6, 2, 2, 2, 4), strides=steps3,
        padding="VALID")
    case("BiasAdd", real(6, 4, 3), real(3))
    case("BiasAdd", real(6, 12), real(12))
    case("BiasAdd", real(6, 6, 2, 2), real(6), data_format="NCHW")
    case("BiasAddGrad", real(6, 4, 3))
    case("BiasAddGrad", real(6, 12))
    case("BiasAddGrad", real(2, 6, 6, 2), data_format="NCHW")


def _images() -> None:
    def single(*shape: int) -> np.ndarray:
        return real(*shape, dtype=np.float32)

    image, window, turned = single(6, 4, 6, 3), [1, 2, 2, 1], single(6, 2, 3, 3)
    pool = {"ksize": window, "strides": window, "padding": "VALID"}
    pool3 = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
    box, less = single(6, 4, 4, 4, 2), single(6, 2, 2, 2, 2)
    case("MaxPool", image, **pool)
    case("MaxPool", single(12, 4, 4, 1), **pool)
    case("MaxPoolV2", image, window, window, padding="VALID")
    case("AvgPool", image, **pool)
    case("AvgPoolGrad", np.asarray(image.shape, np.int32), turned, **pool)
    case("MaxPoolGrad", image, raw.MaxPool(input=image, **pool).numpy(), turned, **pool)
    case("MaxPoolGradGrad", image, raw.MaxPool(input=image, **pool).numpy(), image, **pool)
    case("MaxPool3D", box, **pool3)
    case("AvgPool3D", box, **pool3)
    case("AvgPool3DGrad", np.asarray(box.shape, np.int32), less, **pool3)
    case("MaxPool3DGrad", box, raw.MaxPool3D(input=box, **pool3).numpy(), less, **pool3)
    case("MaxPool3DGradGrad", box, raw.MaxPool3D(input=box, **pool3).numpy(), box, **pool3)
    case(
        "Dilation2D", image, single(2, 2, 3), strides=[1, 1, 1, 1], rates=[1, 1, 1, 1],
        padding="VALID")
    case("LRN", image)
    case("LRNGrad", image, image, raw.LRN(input=image).numpy())
    for type in ("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"):
        case(type, image, [3, 6])
    case("ResizeBilinearGrad", single(6, 3, 3, 2), image[..., :2])
    case("ResizeBicubicGrad", single(6, 3, 3, 2), image[..., :2])
    case("ResizeNearestNeighborGrad", single(6, 3, 3, 2), [6, 4])
    case("AdjustContrastv2", image, 0.5)
    case("AdjustContrastv2", single(6, 12, 6), 0.5)
    case("AdjustHue", image, 0.2)
    case("AdjustSaturation", image, 0.6)
    case("HSVToRGB", image)
    case("RGBToHSV", image)
    case("RGBToHSV", single(6, 12, 3))
    case("SpaceToDepth", image, block_size=2)
    case("DepthToSpace", single(6, 2, 3, 4), block_size=2)
    for rows, strides in ((6, [2, 1]), (6, [1, 1]), (12, [2, 1])):
        case("SpaceToBatchND", real(rows, 3, 4, 2), strides, [[0, 1], [1, 1]])
    for rows, strides in ((12, [2, 1]), (12, [1, 1]), (24, [2, 1]), (24, [2, 2])):
        case("BatchToSpaceND", real(rows, 3, 4, 2), strides, [[0, 1], [1, 1]])
    case(
        "ExtractImagePatches", image, ksizes=window, strides=window, rates=[1, 1, 1, 1],
        padding="VALID")
    case(
        "ExtractVolumePatches", box, ksizes=[1, 2, 2, 2, 1], strides=[1, 1, 1, 1, 1],
        padding="VALID")


def _reductions() -> None:
    for type in ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm", "All", "Any"):
        make = flags if type in ("All", "Any") else lambda *s: real(*s, low=-1.0)
        for shape, axes in (
            ((6, 4), [0]),
            ((6, 4), [1]),
            ((4, 12), [0, 1]),
            ((3, 6, 2), [-2, 2]),
            ((6, 12), 1),
            ((6, 4), []),
            ((6, 4), [1, 0]),
        ):
            for keep in (False, True):
                case(type, make(*shape), axes, keep_dims=keep)
        case(type, make(6, 4), np.asarray([1], np.int32))
        if type not in ("All", "Any"):
            case(type, whole(6, 4), [0])
            case(type, np.asarray([4, 6, 2], np.int32), [0])
    case("Mean", real(12, 4, dtype=np.float16), [0])
    case("Mean", real(6, 4, 2).astype(np.complex128), [0, 1])
    for type in ("Max", "Min", "Prod"):
        case(type, real(6, 4, low=-3.0, high=-2.0), [0])
    for type in ("ArgMax", "ArgMin"):
        case(type, real(6, 4), 1)
        case(type, real(12, 3, 6), 1)
        case(type, real(6, 12), -1)
        case(type, real(6, 12), 0)
    case("L2Loss", real(6, 4))
    case("L2Loss", real(3, 12))
    around("Assert", _checked, real(6, 4))
    _along_axes()


def _checked(x: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([raw.Assert(condition=tf.reduce_all(x > 0), data=[x, "all"])]):
        return tf.identity(x)


def _along_axes() -> None:
    for type in ("Cumsum", "Cumprod", "CumulativeLogsumexp"):
        for axis in (0, 1, -1):
            case(type, real(6, 12), axis, exclusive=axis == 1, reverse=axis == -1)
    for axes in ([0], [1], [], [-1, 0]):
        case("ReverseV2", real(6, 12), axes)
    for attrs in ({"seq_dim": 1}, {"seq_dim": 0, "batch_dim": 1}, {"seq_dim": 2}):
        lengths = whole(12 if "batch_dim" in attrs else 6, low=1)
        case("ReverseSequence", real(6, 12, 6), lengths, **attrs)
    case("Roll", real(6, 12), 2, 1)
    case("Roll", real(6, 12), [1, 2], [0, 1])
    case("Roll", real(6, 12), whole(), 1)
    for type in ("Softmax", "LogSoftmax"):
        case(type, real(6, 4))
        case(type, real(2, 6, 12))
        case(type, real(12))
    case("TopKV2", real(6, 4), 2)
    case("TopKV2", real(3, 12), 6)
    case("TopKV2", real(3, 6), np.asarray(6, np.int32))
    around("TopKV2", lambda x: raw.TopKV2(input=x, k=tf.shape(x)[1]), real(4, 12))
    case("NthElement", real(6, 4), 2)
    case("InTopKV2", real(6, 4, dtype=np.float32), whole(6), 2)
    case("SoftmaxCrossEntropyWithLogits", real(6, 4), real(6, 4))
    case("SoftmaxCrossEntropyWithLogits", real(12, 6), real(1, 6))
    case("SparseSoftmaxCrossEntropyWithLogits", real(6, 4), whole(6))
    case("SparseSoftmaxCrossEntropyWithLogits", real(12, 6), whole(12))


_elementwise()
_quantized()
_contractions()
_reductions()
