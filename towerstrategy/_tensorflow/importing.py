"""Operations of a GraphDef -> operations of a graph, on the devices that they say.

Goes in: nodes, and what they take from the graph.  Comes out: the operations.

``tf.graph_util.import_graph_def`` looks for the device of each operation anew, in the scopes around
it, which takes half of its time: copies of towers know theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import c_api_util


def import_nodes(graph: tf.Graph, graph_def: Any,
                 inputs: Mapping[tuple[str, int], tf.Tensor]) -> list[tf.Operation]:
    """Imports the nodes of ``graph_def``, with full names of devices; their operations, in order.

    ``inputs`` are the tensors of ``graph`` for outputs of operations that are no nodes.
    """
    options = c_api_util.ScopedTFImportGraphDefOptions()
    pywrap_tf_session.TF_ImportGraphDefOptionsSetUniquifyNames(options.options, True)
    for node in graph_def.node:
        pywrap_tf_session.TF_ImportGraphDefOptionsAddReturnOperation(options.options, node.name)
    for (name, index), tensor in inputs.items():
        pywrap_tf_session.TF_ImportGraphDefOptionsAddInputMapping(
            options.options, name, index, tensor._as_tf_output())
    buffer = pywrap_tf_session.TF_NewBufferFromString(graph_def.SerializeToString())
    try:
        with graph._mutation_lock():
            with graph._c_graph.get() as c_graph:
                results = c_api_util.ScopedTFImportGraphDefResults(
                    pywrap_tf_session.TF_GraphImportGraphDefWithResults(
                        c_graph, buffer, options.options))
            graph._add_new_tf_operations(compute_devices=False)
    finally:
        pywrap_tf_session.TF_DeleteBuffer(buffer)
    made = pywrap_tf_session.TF_ImportGraphDefResultsReturnOperations(results.results)
    return [graph._get_operation_by_tf_operation(operation) for operation in made]
