"""Keras models as scikit-learn estimators (SciKeras), on towers.

Goes in: scikit-learn's digits.  Comes out: a ``KerasClassifier`` in a pipeline, compared with one
device, then cross-validated and tuned by scikit-learn's grid search.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/scikit_learn.py
"""

from __future__ import annotations

import contextlib
from typing import Any

import common
import keras
import numpy as np
from scikeras.wrappers import KerasClassifier
from sklearn import datasets, model_selection, pipeline, preprocessing

import towerstrategy

MAX_DIFFERENCE = 1e-4


def estimator(strategy: towerstrategy.TowerStrategy | None, **options: Any) -> Any:
    """A pipeline that scales and classifies; its model is made and compiled in the scope."""
    def build(units: int = 8) -> Any:
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = keras.Sequential([
                keras.Input([64]), keras.layers.Dense(units, activation="tanh"),
                keras.layers.Dense(10, activation="softmax")])
            model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    return pipeline.make_pipeline(preprocessing.StandardScaler(), KerasClassifier(
        build, random_state=1, batch_size=common.BATCH, epochs=2, shuffle=False, verbose=0,
        **options))


def main() -> None:
    findings = common.Findings("keras", "scikeras", "scikit-learn")
    strategy = common.towers()
    x, y = datasets.load_digits(return_X_y=True)
    x, y = x[:203], y[:203]
    answers = [estimator(used).fit(x, y).predict_proba(x) for used in (strategy, None)]
    findings.at_most("probabilities, compared with one device", common.difference(
        answers[:1], answers[1:]), MAX_DIFFERENCE)
    scores = model_selection.cross_val_score(estimator(strategy), x, y, cv=2)
    findings.report("cross-validated", str(np.round(scores, 2)), np.all(scores > 0.5))
    search = model_selection.GridSearchCV(
        estimator(strategy, units=8), {"kerasclassifier__units": [2, 16]}, cv=2).fit(x, y)
    findings.report("best of 2 and 16 units", str(search.best_params_["kerasclassifier__units"]),
                    search.best_params_["kerasclassifier__units"] == 16)
    findings.exit()


if __name__ == "__main__":
    main()
