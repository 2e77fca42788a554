"""clusters: a worker that does not answer is named once, one that only stumbled is not."""

import threading
from unittest import mock

from absl.testing import parameterized

from towerstrategy.extras.machines import clusters

CLUSTER = clusters.Cluster((("chief", 0, "a:1"), *(
    ("worker", number, f"{host}:1") for number, host in enumerate("bcd"))), 2)


class HealthTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.multiple(clusters, INTERVAL=0.001))

    def watched(self, answer):
        """Watches with ``answer(task)`` for a worker's; what the collective ops were ended with."""
        ended, messages = threading.Event(), []
        with mock.patch.multiple(
                clusters._tf, ask_worker=lambda task, seconds: answer(task, ended),
                end_collectives=messages.append):
            clusters._watch(CLUSTER, ended)
        return messages

    def test_names_the_one_that_is_gone(self):
        """Else nobody knows which machine to look at."""
        gone = {"/job:worker/replica:0/task:2": "dead"}
        message, = self.watched(lambda task, _: gone.get(task))
        self.assertIn("from worker 3 (/job:worker/replica:0/task:2 at d:1) (dead)", message)
        self.assertIn("this one is worker 2 (/job:worker/replica:0/task:1 at c:1)", message)
        self.assertNotIn("chief", message)

    def test_names_all_that_are_gone(self):
        """Else one that ended because another failed is taken for the one that failed."""
        gone = {"/job:chief/replica:0/task:0": "ended", "/job:worker/replica:0/task:2": "dead"}
        message, = self.watched(lambda task, _: gone.get(task))
        self.assertIn("from worker 0 (/job:chief/replica:0/task:0 at a:1) (ended), "
                      "worker 3 (/job:worker/replica:0/task:2 at d:1) (dead): ", message)

    def test_one_that_stumbles_is_not_gone(self):
        """Else a short gap in the network ends a training of days."""
        asked = []

        def answer(task, ended):
            asked.append(task)
            if len(asked) > 60:
                ended.set()
            # Of three questions in a row, two stay unanswered.
            return "silent" if "chief" in task and asked.count(task) % 3 else None

        self.assertEmpty(self.watched(answer))

    def test_ends_with_the_process(self):
        """Else a worker that has come to its end calls the others gone."""

        def answer(task, ended):
            del task
            ended.set()
            return "silent"

        self.assertEmpty(self.watched(answer))
