"""What a step on GPUs copies, by the memory that its kernels ask for; no GPU is needed.

Goes in: the operations of a traced step. Comes out: each tensor that is in one memory and is taken
from another: the host's, or a GPU's. The rules are TensorFlow's:

- A kernel for GPUs says which of its inputs and outputs are in the host's memory, such as shapes
  and int32; what has no such kernel runs on the host.
- What XLA compiles as one takes and gives tensors in the GPU's memory, but for what must be known
  to compile it: what all kernels of an operation for GPUs take from the host.
- What it gives from there to who takes it from the host TensorFlow makes again outside, where the
  kernel has it on the host. Not so what asks a tensor's shape: that would give the tensor back.
- What is made of constants alone is a constant.
"""

import collections
import math

import tensorflow as tf

from benchmarks import flat, fusion, on_gpus
from towerstrategy import _tensorflow as _tf
from towerstrategy._tensorflow import graphs

HOST = on_gpus.HOST
OF_BATCH = ("IteratorGetNext", "OptionalGetValue", "IteratorGetNextAsOptional", "OptionalHasValue")


class Memories:
    """Where the tensors of a step's operations are.

    Attributes:
      stretches: for each operation what XLA compiles it with, None for nothing.
    """

    def __init__(self, operations):
        self.operations = operations
        groups = fusion.find_groups(operations, [bool(each.xla_scope) for each in operations])
        self.stretches = [group if each.xla_scope else None
                          for group, each in zip(groups, operations)]
        self._known = [each.traced is not None and bool(each.sizes) and all(
            _tf.constant_value(tensor) is not None for tensor in each.traced.outputs)
            for each in operations]
        self._asks = [each.type in flat.SHAPE_OPS and not known
                      for each, known in zip(operations, self._known)]
        for number, each in enumerate(operations):  # what asks for a shape begins no stretch
            if self._asks[number] and all(self.stretches[source] != self.stretches[number]
                                          for source, _ in each.inputs):
                self.stretches[number] = None
        self._kernels = list(map(_kernel, operations, self._known))
        self._fixed = [set() for _ in operations]  # inputs that must be known to compile it
        self._again = set()  # operations that are made again outside of their stretch
        readers = collections.defaultdict(list)
        for number in reversed(range(len(operations))):
            if self.stretches[number] is not None:
                self._look_at(number, readers[number])
            for place, (source, _) in enumerate(operations[number].inputs):
                readers[source].append((number, place))

    def _look_at(self, number, readers):
        each, own = self.operations[number], self.stretches[number]
        fixed = on_host(each.traced, of_any_type=True)[0]
        if not self._asks[number] and any(
                self.stretches[reader] == own and place in self._fixed[reader]
                for reader, place in readers):
            fixed = [True] * len(fixed)
        self._fixed[number] = {place for place, known in enumerate(fixed) if known}
        if all(self._kernels[number][1]) and not self._asks[number] and any(
                self.stretches[reader] != own or reader in self._again for reader, _ in readers):
            self._again.add(number)

    def crossings(self):
        """(operation, output, from, to) of each tensor that crosses, once for each place."""
        found = {}
        for number, each in enumerate(self.operations):
            if self._known[number]:
                continue
            for own in {self.stretches[number], None if number in self._again
                        else self.stretches[number]}:
                for place, source in enumerate(each.inputs):
                    start, target = self._made(*source), self._taken(number, place, own)
                    if start != target and not self._is_within(source[0], own):
                        found[source, target] = start
        for ((source, index), target), start in found.items():
            yield self.operations[source], index, start, target

    def given(self):
        """(operation, output) of each tensor that a stretch gives."""
        return {(source, index) for number, each in enumerate(self.operations)
                for source, index in each.inputs if self.stretches[source] is not None
                and source not in self._again and not self._known[source]
                and not self._is_within(source, self.stretches[number])}

    def _is_within(self, source, stretch):
        """Whether what is compiled as one has that in it."""
        if stretch is None:
            return False
        return self.stretches[source] == stretch or self._known[source] and (
            self.operations[source].xla_scope == self.operations[stretch].xla_scope)

    def _made(self, number, index):
        outside = self.stretches[number] is None or number in self._again
        on_host = outside and self._kernels[number][1][index]
        return HOST if on_host else self.operations[number].device

    def _taken(self, number, place, stretch):
        on_host = self._kernels[number][0][place] if stretch is None \
            else place in self._fixed[number]
        return HOST if on_host else self.operations[number].device


def _kernel(each, known):
    """For each input and output of an operation whether it is in the host's memory."""
    if each.traced is None or each.device == HOST:
        return [each.device == HOST] * len(each.inputs), [each.device == HOST] * len(each.sizes)
    taken, given = on_host(each.traced)
    # Constants of int32 are on the host.
    return taken, [each.traced.outputs[0].dtype == tf.int32] * len(given) if known else given


def on_host(operation, of_any_type=False):
    """For each input, and each output, of an op on a GPU: whether it is in the host's memory.

    It is so if the op's kernel says so; with ``of_any_type``, if the kernels for all dtypes do.
    Without a GPU kernel, all are in the host's memory.
    """
    definition, node = operation.op_def, operation.node_def
    kernels = [each for kind in ("GPU", "DEFAULT") for each in graphs._kernels(node.op, kind)]
    if not of_any_type:
        kernels = [each for each in kernels if graphs._fits(node, each)][:1]
    return tuple([all(arg.name in kernel.host_memory_arg for kernel in kernels)
                  for arg in args for _ in range(graphs.length(node, arg))]
                 for args in (definition.input_arg, definition.output_arg))


def size_of(operation, index, rows):
    """The bytes of an output, where an open dimension is ``rows``."""
    if operation.traced is None:
        return operation.sizes[index]
    tensor = operation.traced.outputs[index]
    if tensor.shape.rank is None or tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return tensor.dtype.size * math.prod(
        rows if size is None else size for size in tensor.shape.as_list())
