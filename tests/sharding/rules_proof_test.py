"""Tests of the table of rules: each operation is run whole and in uneven pieces, and both agree."""

import collections
import functools

import numpy as np
import proof_cases  # noqa: F401  registers samples
import proof_cases_algebra  # noqa: F401
import proof_cases_moves  # noqa: F401
import proof_cases_rows  # noqa: F401
import tensorflow as tf
from absl.testing import absltest, parameterized
from proof import KINDS_OF_SHAPES, Sample, prove
from proof_samples import samples

import wide
from towerstrategy.sharding import rules  # noqa: F401  fills the table
from towerstrategy.sharding.rules import registry
from towerstrategy.sharding.rules.registry import Plan
from towerstrategy.sharding.spec import SUM

# Claims of a sample, and kinds of static shapes, that the default run tries, of one sample of each
# type, and that others try, of all samples: 14,000 in `make test-all`, more in `make test-slow`.
FEW, MANY, ALL = (2, 2), (16, 2), (200, KINDS_OF_SHAPES)
# CPU kernels that still fail for some samples, padded or not, where a tower has no rows.
FAIL_ON_NO_ROWS = {"MirrorPad", "MirrorPadGrad"}
# TensorFlow has no CPU kernel of these, or has it no longer.
NO_KERNEL = {"BatchMatrixTriangularSolve", "LookupTableFind", "SegmentMaxV2", "SegmentMinV2",
             "SegmentProdV2", "SegmentSumV2"}


@functools.cache
def _outcomes(claims, kinds):
    """What came of each operation's samples; with few claims, up to the first that has some."""
    outcomes = collections.defaultdict(list)
    for sample in samples():
        if (claims, kinds) != FEW or not any(one.claims for one in outcomes[sample.type]):
            outcomes[sample.type].append(prove(sample, claims, kinds))
    return outcomes


class RulesTest(parameterized.TestCase):

    @wide.parameters(FEW, wide=[MANY], rest=[ALL])
    def test_no_claim_is_wrong(self, *tried):
        """Training would silently give other weights than one device gives."""
        wrong = [text for outcomes in _outcomes(*tried).values() for outcome in outcomes
                 for text in outcome.wrong]
        self.assertFalse(wrong, "\n".join(wrong[:20]))

    def test_each_rule_is_proved(self):
        """A rule could be added that nobody has checked."""
        missing = set(registry._RULES) - set(_outcomes(*FEW)) - NO_KERNEL
        self.assertFalse(missing, "write samples, as tests/sharding/proof_cases.py does")

    def test_each_rule_claims_something(self):
        """A rule that stopped claiming would be slow, and its proof would prove nothing."""
        idle = {type for type, outcomes in _outcomes(*FEW).items()
                if not sum(one.claims for one in outcomes)}
        self.assertFalse(idle)

    def test_kernels_that_fail_on_no_rows_are_known(self):
        """The last batch of an epoch, when a tower gets none of it, would stop the training."""
        found = {type for type, outcomes in _outcomes(*FEW).items()
                 if any(one.needs_rows for one in outcomes)}
        self.assertLessEqual(found, FAIL_ON_NO_ROWS)


class ProofTest(absltest.TestCase):

    def _proved(self, type, rule, *arrays, **attrs):
        before = registry._RULES[type]
        registry.register(type, rule)
        self.addCleanup(registry.register, type, before)
        call = getattr(tf.raw_ops, type)
        names = ("x",) if type == "Abs" else ("input",)
        return prove(Sample(type, lambda *fed: call(**dict(zip(names, fed)), **attrs), arrays))

    def test_a_wrong_place_of_the_rows_is_found(self):
        """The proof would pass whatever the table claims."""
        outcome = self._proved("Sum", registry.by_example, np.ones([4, 6]), axis=[0])
        self.assertFalse(outcome.wrong)  # it claims nothing of rows in the second dimension
        outcome = self._proved("Sum", registry.by_example, np.ones([6, 4]), axis=[0])
        self.assertIn("Sum", outcome.wrong[0])

    def test_a_wrong_reduction_is_found(self):
        """Products of parts could be claimed to add up."""
        def rule(op, specs):
            return Plan([specs[0], *specs[1:]], [SUM])

        outcome = self._proved("Prod", rule, np.arange(24.0).reshape(6, 4), axis=[0])
        self.assertTrue(any("Partial" in text for text in outcome.wrong), outcome.wrong)

    def test_what_raises_is_found(self):
        """A plan that cannot be made would stop the user's training."""
        def rule(op, specs):
            def make(maker):
                raise KeyError("made by nobody")

            return Plan(specs, specs, make=make)

        outcome = self._proved("Abs", rule, np.ones([6, 4]))
        self.assertIn("made by nobody", outcome.wrong[0])


if __name__ == "__main__":
    absltest.main()
