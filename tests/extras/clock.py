"""A profiler whose towers take the times that a test says."""

import contextlib
from unittest import mock

import numpy as np

import towerstrategy
from towerstrategy.extras.report import sample as sample_lib


class Clock:
    """Stands for the profiler: a tower takes ``seconds`` a row, and ``launch`` for any rows."""

    def __init__(self, *seconds, launch=0., noise=0., cost=0., power=1):
        self.power = power
        self.seconds, self.noise, self.cost = seconds, np.random.RandomState(1), cost
        self.launch = launch
        self.begun = self.ended = 0
        self._most = noise
        self.shares = None

    def __call__(self, what):
        del what
        self.begun += 1
        return self

    run = sample_lib.Recording.run

    def end(self, placement):
        del placement
        self.ended += 1
        noise = 1 + self._most * self.noise.uniform(-1, 1, len(self.seconds))
        times = (self.launch + np.array(self.shares.rows()) ** self.power * self.seconds) * noise
        return sample_lib.Sample(1., tuple(times), 0., 0., 0., 0.)

    @contextlib.contextmanager
    def running(self):
        with mock.patch.object(sample_lib, "begin", self):
            towers = [f"CPU:{tower}" for tower in range(len(self.seconds))]
            strategy = towerstrategy.TowerStrategy(towers, shares="measured")
            self.shares = strategy.extended.inputs.measuring.shares
            yield strategy
