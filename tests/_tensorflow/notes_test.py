"""_tensorflow.add_note where Python has no notes of its own: 3.10."""

import tensorflow as tf
from absl.testing import absltest, parameterized

from towerstrategy._tensorflow import errors


class _Own(Exception):
    pass


class _Special(Exception):

    def __str__(self):
        return f"special {self.args[0]}"


class NotesTest(parameterized.TestCase):

    @parameterized.parameters(
        ValueError("what"), _Own("what"), tf.errors.InvalidArgumentError(None, None, "what"))
    def test_is_in_the_message(self, error):
        """Else somebody with Python 3.10 is not told which tower it was."""
        errors._tell(error, "in tower 1")
        self.assertEqual(str(error), "what\nin tower 1")
        self.assertFalse(hasattr(error, "__notes__"))

    @parameterized.parameters(KeyError("what"), OSError(2, "what"), _Special("what"))
    def test_leaves_other_arguments_alone(self, error):
        """Else code that looks at an error's arguments finds a sentence in them."""
        arguments, text = error.args, str(error)
        errors._tell(error, "in tower 1")
        errors._tell(error, "of two")
        self.assertEqual((error.args, str(error)), (arguments, text))
        self.assertEqual(error.__notes__, ["in tower 1", "of two"])


if __name__ == "__main__":
    absltest.main()
