"""KerasHub on towers: a BERT classifier and a GPT-2 language model, both tiny, with random weights.

Goes in: made-up sentences, and vocabularies made from them.  Comes out: both models, trained by
``fit`` and then fine-tuned with LoRA, and, without dropout, the differences of their weights from
one device's; the accuracy of the classifier, and texts that the language model generates.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/hub.py

KerasHub needs Keras 3, and its tokenizers need ``tensorflow-text``.
"""

from __future__ import annotations

from typing import Any

import common
import keras
import keras_hub
import numpy as np

import towerstrategy

MAX_DIFFERENCE = 1e-5
LENGTH = 12
SUBJECTS = ("cat", "dog", "bird", "fish")
VERBS = {"likes": 1, "loves": 1, "hates": 0, "fears": 0}
SENTENCES = [f"the {one} {verb} the {other}" for one in SUBJECTS for verb in VERBS
             for other in SUBJECTS if one != other]
LABELS = np.array([VERBS[sentence.split()[2]] for sentence in SENTENCES])


def classifier(dropout: float, optimizer: Any) -> Any:
    """A model that classifies whether a sentence is predicted."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    tokenizer = keras_hub.models.BertTokenizer(
        vocabulary=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words], lowercase=True)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=tokenizer.vocabulary_size(), num_layers=2, num_heads=2, hidden_dim=16,
        intermediate_dim=32, max_sequence_length=LENGTH, dropout=dropout)
    model = keras_hub.models.BertTextClassifier(
        backbone, num_classes=2, dropout=dropout,
        preprocessor=keras_hub.models.BertTextClassifierPreprocessor(tokenizer, LENGTH))
    model.compile(optimizer,
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=["accuracy"], jit_compile=False)
    return model


def language_model(dropout: float, optimizer: Any) -> Any:
    """A model that continues a sentence; its tokens are single letters, "th" and "the"."""
    letters = sorted(set("".join(SENTENCES).replace(" ", "Ġ")))
    tokens = ["<|endoftext|>", *letters, "th", "the"]
    tokenizer = keras_hub.models.GPT2Tokenizer(
        vocabulary={token: number for number, token in enumerate(tokens)},
        merges=["t h", "th e"])
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=tokenizer.vocabulary_size(), num_layers=2, num_heads=2, hidden_dim=16,
        intermediate_dim=32, max_sequence_length=2 * LENGTH, dropout=dropout)
    model = keras_hub.models.GPT2CausalLM(
        backbone, preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, 2 * LENGTH))
    model.compile(optimizer,
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  weighted_metrics=["accuracy"], jit_compile=False, sampler="greedy")
    return model


def twins(strategy: towerstrategy.TowerStrategy, make: Any, data: tuple[Any, ...]
          ) -> tuple[Any, Any]:
    """The model on the towers and on one device, trained for two epochs without dropout.

    SGD, not Adam: the gradient of the bias of attention's keys is zero in theory, and Adam would
    turn its rounding errors into steps.
    """
    single = make(0.0, keras.optimizers.SGD(0.05, momentum=0.9))
    with strategy.scope():
        on_towers = make(0.0, keras.optimizers.SGD(0.05, momentum=0.9))
    on_towers.set_weights(single.get_weights())
    train(on_towers, single, data)
    return on_towers, single


def train(on_towers: Any, single: Any, data: tuple[Any, ...]) -> None:
    """Trains both models for two epochs."""
    for model in (on_towers, single):
        model.fit(*data, batch_size=common.BATCH, epochs=2, shuffle=False, verbose=0)


def fine_tune(findings: common.Findings, name: str, on_towers: Any, single: Any,
              data: tuple[Any, ...]) -> None:
    """Trains only the LoRA weights and the head for two epochs; checks that the others are frozen.
    """
    for model in (on_towers, single):
        model.backbone.enable_lora(2)
        # A compiled step keeps its list of weights: compile again, as on one device.
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), model.loss, jit_compile=False)
    on_towers.set_weights(single.get_weights())  # LoRA's weights are initialized at random
    before = [weight.numpy() for weight in on_towers.non_trainable_weights]
    train(on_towers, single, data)
    added = [weight.numpy() for weight in on_towers.trainable_weights if "lora" in weight.path]
    second = added[1::2]  # the factor of each kernel that is initialized with zeros
    findings.report(f"{name}, LoRA's weights", f"{len(added)}, all trained",
                    bool(second) and all(np.any(factor) for factor in second))
    findings.at_most(f"{name}, fine-tuned by LoRA, compared with one device", common.difference(
        on_towers.get_weights(), single.get_weights()), MAX_DIFFERENCE)
    findings.report(f"{name}, frozen weights", "as before", all(
        np.array_equal(weight.numpy(), old) or "seed" in weight.path
        for weight, old in zip(on_towers.non_trainable_weights, before)))


def main() -> None:
    findings = common.Findings("keras", "keras-hub", "tensorflow-text")
    strategy = common.towers()
    sentences = np.array(SENTENCES)
    for make, data in ((classifier, (sentences, LABELS)), (language_model, (sentences,))):
        name = make.__name__.replace("_", " ")
        on_towers, single = twins(strategy, make, data)
        findings.at_most(f"{name}, weights, compared with one device", common.difference(
            on_towers.get_weights(), single.get_weights()), MAX_DIFFERENCE)
        with strategy.scope():
            model = make(0.1, keras.optimizers.Adam(5e-3))
        losses = model.fit(*data, batch_size=common.BATCH, epochs=8, verbose=0).history["loss"]
        findings.report(f"{name}, losses", f"{losses[0]:.3f} to {losses[-1]:.3f}",
                        losses[-1] < losses[0])
        if make is classifier:
            scores = model.predict(sentences, batch_size=common.BATCH, verbose=0)
            predicted = np.argmax(scores, axis=1)
            findings.report(f"{name}, right answers", f"{np.mean(predicted == LABELS):.0%}",
                            np.mean(predicted == LABELS) > 0.9)
        else:
            texts = [each.generate(["the cat", "the dog"], stop_token_ids=None)
                     for each in (on_towers, single, model)]
            findings.report(f"{name}, generate as on one device", repr(texts[0]),
                            texts[0] == texts[1])
            findings.report(f"{name}, generate", repr(texts[2]), len(texts[2][0]) > len("the cat"))
        fine_tune(findings, name, on_towers, single, data)
    findings.exit()


if __name__ == "__main__":
    main()
