"""Random operations, as Keras, generators and replica functions call them.

Each entry of :data:`PRIVATE_NAMES` says where the name stands upstream and why no public name does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import tensor_util
from tensorflow.python.ops import (
    gen_candidate_sampling_ops,
    gen_image_ops,
    gen_nn_ops,
    gen_random_ops,
    gen_stateful_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
    stateful_random_ops,
)

from towerstrategy._tensorflow import wrapping

_WRAPPED = ("from which tf.random, tf.random.Generator and with them both Kerases take their "
            "numbers; in towers a draw is of the tower's rows")
_ONCE = "draws once for all rows of a batch, with a state; in towers all draw the same"

PRIVATE_NAMES = {
    "tensorflow.python.framework.tensor_util:constant_value_as_shape":
        "what is known of a shape, where some of its dimensions are",
    **{f"tensorflow.python.ops.gen_stateless_random_ops_v2:{name}": _WRAPPED for name in (
        "stateless_random_uniform_v2", "stateless_random_normal_v2",
        "stateless_truncated_normal_v2", "stateless_random_uniform_int_v2",
        "stateless_random_uniform_full_int_v2", "stateless_random_gamma_v3",
        "stateless_shuffle")},
    **{f"tensorflow.python.ops.gen_stateless_random_ops:{name}": _WRAPPED for name in (
        "stateless_random_poisson", "stateless_random_binomial", "stateless_multinomial",
        "stateless_parameterized_truncated_normal")},
    **{f"tensorflow.python.ops.gen_random_ops:{name}": _WRAPPED for name in (
        "random_uniform", "random_standard_normal", "truncated_normal", "random_uniform_int",
        "random_shuffle", "random_gamma", "random_poisson_v2", "multinomial")},
    "tensorflow.python.ops.gen_stateful_random_ops:stateful_random_binomial": _WRAPPED,
    **{f"tensorflow.python.ops.gen_candidate_sampling_ops:{name}": _ONCE for name in (
        "uniform_candidate_sampler", "log_uniform_candidate_sampler",
        "fixed_unigram_candidate_sampler", "all_candidate_sampler")},
    **{f"tensorflow.python.ops.gen_image_ops:{name}": _ONCE for name in (
        "sample_distorted_bounding_box_v2",)},
    **{f"tensorflow.python.ops.gen_nn_ops:{name}": _ONCE for name in (
        "fractional_max_pool", "fractional_avg_pool")},
    "tensorflow.python.ops.stateful_random_ops:Generator._prepare_key_counter":
        "moves a generator on by a draw and folds in the replica's number; in towers it is moved "
        "on once, by the whole batch's draw",
    "tensorflow.python.ops.stateful_random_ops:Generator._uniform_full_int":
        "the same for what may be seeds",
    "tensorflow.python.ops.stateful_random_ops:Generator.skip":
        "tf.random.Generator.skip, which towers call once",
    "tensorflow.python.eager.context:anonymous_name": "names a variable that a trace holds",
}

PHILOX, AUTO_SELECT = tf.random.Algorithm.PHILOX.value, tf.random.Algorithm.AUTO_SELECT.value
# How many 128-bit counters a generator is moved on for each number that is drawn, whatever it takes
# (GuardedPhiloxRandom::ReserveRandomOutputs, RngReadAndSkip).
RESERVED = 256

# Takes the function that makes an operation and its arguments by name; None is no answer.
Rule = Callable[[Callable[..., Any], dict[str, Any]], Any]

_OWNERS = (gen_stateless_random_ops_v2, gen_stateless_random_ops, gen_random_ops,
           gen_stateful_random_ops, gen_candidate_sampling_ops, gen_image_ops, gen_nn_ops)


def wrap_draws(rules: Mapping[str, Rule], counter: Callable[..., Any],
               skipping: Callable[..., Any]) -> None:
    """Wraps the functions that make random operations, once.

    Args:
      rules: for each function's name what is called instead.
      counter: given what moves a generator on, makes a function of a generator, a shape, and
        whether seeds are drawn, that gives key and counter, or None to leave the generator alone.
      skipping: given the same, makes a function of a generator and how far to move it on, that
        gives where it was, or None to leave it alone.
    """
    for owner in _OWNERS:
        for name in rules.keys() & vars(owner).keys():
            wrapping.wrap(owner, name, functools.partial(_wrapped, rules[name]))
    generator = stateful_random_ops.Generator
    skip = getattr(generator.skip, wrapping.MARK, generator.skip)
    taken = counter(skip)
    wrapping.wrap(generator, "_prepare_key_counter", functools.partial(_counting, taken))
    wrapping.wrap(generator, "_uniform_full_int", functools.partial(_seeding, taken))
    wrapping.wrap(generator, "skip", functools.partial(_skipping, skipping(skip)))


def _counting(taken: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare_key_counter(self: Any, shape: Any) -> Any:
        found = taken(self, shape, False) if is_philox({"alg": self.algorithm}) else None
        return original(self, shape) if found is None else found

    return _prepare_key_counter


def _seeding(taken: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def _uniform_full_int(self: Any, shape: Any, dtype: tf.DType, name: str | None = None) -> Any:
        found = taken(self, shape, True) if is_philox({"alg": self.algorithm}) else None
        if found is None:
            return original(self, shape, dtype, name)
        key, counter = found
        return draw_by_counter("stateless_random_uniform_full_int_v2", shape=shape, key=key,
                               counter=counter, dtype=dtype, name=name)

    return _uniform_full_int


def _skipping(moved: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def skip(self: Any, delta: Any) -> Any:
        found = moved(self, delta) if is_philox({"alg": self.algorithm}) else None
        return original(self, delta) if found is None else found

    return skip


def _wrapped(rule: Rule, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def draw(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return rule(original, bound.arguments)

    return draw


def draw_by_counter(function: str, **arguments: Any) -> Any:
    """Calls one of the wrapped functions that are given key and counter."""
    return getattr(gen_stateless_random_ops_v2, function)(alg=PHILOX, **arguments)


def is_philox(arguments: Mapping[str, Any]) -> bool:
    """Whether an operation draws by Philox, as it does where it is not told."""
    return tf.get_static_value(arguments.get("alg", PHILOX)) in (PHILOX, AUTO_SELECT)


def known_shape(shape: tf.Tensor) -> tf.TensorShape:
    """What is known of the value of ``shape``, a vector."""
    known = tensor_util.constant_value_as_shape(shape)
    if tf.is_symbolic_tensor(shape) and shape.op.type == "Pack":
        known = known.merge_with([_known_length(length) for length in shape.op.inputs])
    return known


def _known_length(length: tf.Tensor) -> int | None:
    """What is known of one length, written as ``tf.shape(value)[dimension]``."""
    operation = length.op
    source = operation.inputs[0].op if operation.type == "StridedSlice" else None
    if source is None or source.type != "Shape" or operation.get_attr("shrink_axis_mask") != 1:
        return None
    begin = tf.get_static_value(operation.inputs[1])
    value = source.inputs[0]
    return None if begin is None or value.shape.rank is None else value.shape[int(begin[0])]


def key_and_counter(state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Of a Philox generator's state, its key and its counter."""
    return tf.bitcast(state[2:3], tf.uint64), tf.bitcast(state[:2], tf.uint64)


def counts(devices: Sequence[str]) -> list[tf.Tensor]:
    """Handles of counts that begin with the trace, as does the state of an operation's kernel.

    They are freed with the function that is being traced, which alone holds them.
    """
    handles = []
    for device in devices:
        with tf.init_scope(), tf.device(device):
            handles.append(tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[],
                                                  shared_name=eager_context.anonymous_name()))
            tf.raw_ops.AssignVariableOp(resource=handles[-1], value=tf.constant(0, tf.int64))
    return handles


def count_up(count: tf.Tensor, by: Any) -> tf.Tensor:
    """Adds to the count of a handle, each time that it runs; what it was before."""
    before = tf.raw_ops.ReadVariableOp(resource=count, dtype=tf.int64)
    tf.raw_ops.AssignAddVariableOp(resource=count, value=tf.cast(by, tf.int64))
    return before
