"""Kernels that TensorFlow has for GPUs alone, written in its operations, for the table's proof.

Goes in: a graph with such operations.  Comes out: :func:`with_kernels`, the same graph, in which
functions do what the kernels do. They refuse what the kernels refuse.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# The kernels' inputs.
INPUT, LENGTHS, OUTPUT_GRADIENTS, KEPT = 0, 4, slice(8, 11), 11

_numbers = itertools.count()


def with_kernels(graph: tf.Graph) -> tf.Graph:
    """``graph``, or a copy of it with functions in place of the operations that have no kernel."""
    graph_def = graph.as_graph_def()
    functions = list(graph_def.library.function)
    nodes = [node for some in (graph_def.node, *(each.node_def for each in functions))
             for node in some if node.op in KERNELS]
    if not nodes:
        return graph
    new = f"_emulated_{next(_numbers)}"  # TensorFlow knows other functions of these names
    for function in functions:
        function.signature.name += new
        _renumber(function)
    for some in (graph_def.node, *(each.node_def for each in functions)):
        for value in (value for node in some for value in node.attr.values()):
            for called in [value.func] * value.HasField("func") + list(value.list.func):
                called.name += new
    with tf.Graph().as_default() as made:
        for node in nodes:
            _call(graph_def, node)
        tf.import_graph_def(graph_def, name="")
    return made


def _renumber(function: Any) -> None:
    """Within a function an operation's outputs have names; those of a call have numbers."""
    numbered = {f"{node.name}:{name}:0": f"{node.name}:output:{place}" for node in function.node_def
                for place, name in enumerate(OUTPUTS.get(node.op, ()))}
    for node in function.node_def:
        node.input[:] = [numbered.get(name, name) for name in node.input]
    for name, given in function.ret.items():
        function.ret[name] = numbered.get(given, given)


def _call(graph_def: Any, node: Any) -> None:
    """Has a node call a function of the graph's library."""
    kind = tf.as_dtype(node.attr["T"].type)
    given = (*[kind] * 4, *[tf.int8] * (len(OUTPUTS[node.op]) - 4))
    taken = (*[kind] * 4, tf.int32, *([kind] * 7 + [tf.int8]) * (node.op != "CudnnRNNV3"))
    concrete = _function(node.op, node.attr["rnn_mode"].s, node.attr["time_major"].b, taken)
    library = graph_def.library.function
    have = {each.signature.name for each in library}
    library.extend(each for each in (
        *concrete.graph.as_graph_def().library.function, concrete.function_def)
        if each.signature.name not in have)
    node.op = "PartitionedCall"
    node.attr.clear()
    node.attr["f"].func.name = concrete.function_def.signature.name
    for name, dtypes in (("Tin", taken), ("Tout", given)):
        node.attr[name].list.type.extend(dtype.as_datatype_enum for dtype in dtypes)


@functools.cache
def _function(type: str, rnn_mode: bytes, time_major: bool, dtypes: Sequence[tf.DType]) -> Any:
    states = 3, 3, 3 if rnn_mode == b"lstm" else 0
    ranks = *states, 1, 1, *states, *states, 1, 1
    return tf.function(
        lambda *inputs: KERNELS[type](inputs, rnn_mode, time_major), autograph=False
    ).get_concrete_function(*(tf.TensorSpec([None] * rank, dtype)
                              for rank, dtype in zip(ranks, dtypes)))


def _recurrent(inputs: Sequence[tf.Tensor], rnn_mode: bytes, time_major: bool) -> list[tf.Tensor]:
    """``CudnnRNNV3``, of one layer in one direction.

    What it keeps for the gradient is what it was given.
    """
    given, lengths = inputs[INPUT], inputs[LENGTHS]
    checks = [tf.debugging.assert_positive(lengths), tf.debugging.assert_positive(tf.size(lengths))]
    with tf.control_dependencies(checks):
        made = _turned([*inputs[:LENGTHS], lengths], rnn_mode, time_major)
    return [*made, tf.reshape(given, [-1]), tf.zeros([0], tf.int8)]


def _turned(inputs: Sequence[tf.Tensor], rnn_mode: bytes, time_major: bool) -> list[tf.Tensor]:
    """Outputs and last states."""
    x, h, c, params, lengths = inputs
    is_lstm, axis = rnn_mode == b"lstm", 0 if time_major else 1
    x = x if time_major else tf.transpose(x, [1, 0, 2])
    h = tf.squeeze(h, axis)
    c = tf.squeeze(c, axis) if is_lstm else h
    gates, units, width = 4 if is_lstm else 3, tf.shape(h)[1], tf.shape(x)[2]
    sizes = [units * width] * gates + [units * units] * gates + [units] * (2 * gates)
    parts = tf.split(params, tf.stack(sizes), num=4 * gates)
    by_input = [tf.reshape(part, [units, width]) for part in parts[:gates]]
    by_state = [tf.reshape(part, [units, units]) for part in parts[gates:2 * gates]]
    biases = parts[2 * gates:3 * gates], parts[3 * gates:]

    def turn(states: Any, step: Any) -> Any:
        number, now = step
        h, c, _ = states
        of_input = [tf.matmul(now, weight, transpose_b=True) + bias
                    for weight, bias in zip(by_input, biases[0])]
        of_state = [tf.matmul(h, weight, transpose_b=True) + bias
                    for weight, bias in zip(by_state, biases[1])]
        if is_lstm:
            i, f, o = (tf.sigmoid(of_input[at] + of_state[at]) for at in (0, 1, 3))
            new_c = f * c + i * tf.tanh(of_input[2] + of_state[2])
            new_h = o * tf.tanh(new_c)
        else:
            r, z = (tf.sigmoid(of_input[at] + of_state[at]) for at in (0, 1))
            new_h = new_c = (1 - z) * tf.tanh(of_input[2] + r * of_state[2]) + z * h
        here = (number < lengths)[:, tf.newaxis]
        return tf.where(here, new_h, h), tf.where(here, new_c, c), tf.where(
            here, new_h, tf.zeros_like(new_h))

    hs, cs, outputs = tf.scan(turn, (tf.range(tf.shape(x)[0]), x), (h, c, h))
    output = outputs if time_major else tf.transpose(outputs, [1, 0, 2])
    last_c = tf.expand_dims(cs[-1], axis) if is_lstm else tf.zeros([], x.dtype)
    return [output, tf.expand_dims(hs[-1], axis), last_c]


def _gradient(inputs: Sequence[tf.Tensor], rnn_mode: bytes, time_major: bool) -> list[tf.Tensor]:
    """``CudnnRNNBackpropV3``."""
    forward = list(inputs[:LENGTHS + 1])
    checks = [tf.debugging.assert_equal(inputs[KEPT], tf.reshape(forward[INPUT], [-1])),
              tf.debugging.assert_positive(forward[LENGTHS])]
    with tf.control_dependencies(checks), tf.GradientTape() as tape:
        of = [tf.identity(each) for each in forward[:LENGTHS]]
        tape.watch(of)
        made = _turned([*of, forward[LENGTHS]], rnn_mode, time_major)
    return tape.gradient(made, of, list(inputs[OUTPUT_GRADIENTS]),
                         unconnected_gradients=tf.UnconnectedGradients.ZERO)


KERNELS: dict[str, Callable[..., list[tf.Tensor]]] = {
    "CudnnRNNV3": _recurrent, "CudnnRNNBackpropV3": _gradient}
OUTPUTS = {"CudnnRNNV3": ("output", "output_h", "output_c", "reserve_space", "host_reserved"),
           "CudnnRNNBackpropV3": ("input_backprop", "input_h_backprop", "input_c_backprop",
                                  "params_backprop")}
