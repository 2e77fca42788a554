"""Logs trainings on towers to TensorBoard, Weights & Biases and MLflow, with their own callbacks.

Goes in: made-up rows.  Comes out: a training on towers for each tracker, which sends no data to any
server, and a check that its files in ``out/trackers`` have the same losses.

    pip install ".[trackers]"     # after `make test-libraries`: .venv-libraries has it
    python examples/trackers.py                 # all of them
    python examples/trackers.py tensorboard     # one: tensorboard, wandb or mlflow

Then ``tensorboard --logdir out/trackers/tensorboard`` shows the losses beside the towers;
``wandb sync out/trackers/wandb/offline-run-*`` uploads, if that is wanted; and
``mlflow ui --backend-store-uri sqlite:///out/trackers/mlflow.db`` serves MLflow's page.
"""

import importlib.util
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf

import towerstrategy

OUT = pathlib.Path("out/trackers").resolve()
EPOCHS = 4


def train(strategy, callbacks):
    """Trains a small network on the towers; returns the losses of its epochs."""
    x = np.random.RandomState(0).rand(990, 8).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True))
    with strategy.scope():
        model = tf.keras.Sequential([
            tf.keras.Input([8]), tf.keras.layers.Dense(64, "tanh"), tf.keras.layers.Dense(1)])
        model.compile("adam", "mse")
    history = model.fit(x, y, batch_size=64, epochs=EPOCHS, verbose=0, callbacks=callbacks,
                        validation_split=0.1)
    return history.history["loss"]


def with_tensorboard(strategy):
    """Keras' callback and TowerReport write to one folder; returns losses and logged losses."""
    folder = OUT / "tensorboard"
    losses = train(strategy, [tf.keras.callbacks.TensorBoard(folder, write_graph=False),
                              towerstrategy.TowerReport(log_dir=folder, print_fn=None, most=1.)])
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    events = EventMultiplexer().AddRunsFromDirectory(str(folder))
    events.Reload()
    print("tensorboard has the runs", *sorted(events.Runs()))
    rows = [sum(tf.make_ndarray(event.tensor_proto) for event in events.Tensors(run, "towers/rows"))
            for run in sorted(events.Runs()) if run.startswith("tower_")]
    print("rows of each tower, all epochs:", *map(int, rows))
    logged = [float(tf.make_ndarray(event.tensor_proto))
            for event in events.Tensors("train", "epoch_loss")]
    return losses, logged[-EPOCHS:]


def with_wandb(strategy):
    """Weights & Biases' callback for Keras, and the towers' rows and idle time as its metrics."""
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    report = towerstrategy.TowerReport(print_fn=None, most=1.)
    with wandb.init(project="towers", mode="offline", dir=OUT) as run:
        losses = train(strategy, [WandbMetricsLogger(), report])
        for part in report.epochs[-1].parts:
            if part.is_tower:
                run.summary[f"{part.name}/rows"] = part.rows
                run.summary[f"{part.name}/idle_share"] = part.idle
        logged = run.summary["epoch/loss"]
    print("wandb wrote", pathlib.Path(run.dir).parent.relative_to(OUT))
    return losses[-1:], [logged]


def with_mlflow(strategy):
    """MLflow's callback for Keras, and the report's numbers and picture as a run's artifacts."""
    import mlflow

    OUT.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(f"sqlite:///{OUT / 'mlflow.db'}")
    picture = OUT / "towers.png"
    report = towerstrategy.TowerReport(picture, print_fn=None, most=1.)
    with mlflow.start_run() as run:
        losses = train(strategy, [mlflow.keras.MlflowCallback(run), report])
        for epoch in report.epochs:
            mlflow.log_metrics({f"{part.name}/idle_share": part.idle for part in epoch.parts
                                if part.idle is not None}, step=epoch.number)
        mlflow.log_artifact(str(picture))
    client = mlflow.MlflowClient()
    logged = [metric.value for metric in client.get_metric_history(run.info.run_id, "loss")]
    print("mlflow wrote", *(file.path for file in client.list_artifacts(run.info.run_id)))
    return losses, logged


def main():
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    trackers = {"tensorboard": with_tensorboard, "wandb": with_wandb, "mlflow": with_mlflow}
    strategy = towerstrategy.TowerStrategy(towerstrategy.split_cpu(4))
    names = sys.argv[1:] or list(trackers)
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f'not installed: {", ".join(missing)}. pip install ".[trackers]" brings them.')
    for name in names:
        losses, logged = trackers[name](strategy)
        np.testing.assert_allclose(logged, losses, rtol=1e-5)
        print(f"{name}: {len(logged)} loss(es) logged, the same as those of fit: {logged[-1]:.5f}")


if __name__ == "__main__":
    main()
