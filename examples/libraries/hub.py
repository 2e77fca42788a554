"""KerasHub on towers: a BERT classifier and a GPT-2 language model, both tiny, with random weights.

Goes in: made-up sentences, and vocabularies made of them on the spot.  Comes out: both trained by
``fit``, their weights without dropout beside one device's, also when LoRA fine-tunes them; the
classifier's answers, and texts that the language model goes on with.

    pip install ".[libraries]"     # after `make test-libraries`: .venv-libraries has it
    python examples/libraries/hub.py

KerasHub's tokenizers need ``tensorflow-text`` and KerasHub needs Keras 3.
"""

from __future__ import annotations

from typing import Any

import common
import keras
import keras_hub
import numpy as np

import towerstrategy

MOST_DIFFERENCE = 1e-5
LENGTH = 12
SUBJECTS = ("cat", "dog", "bird", "fish")
VERBS = {"likes": 1, "loves": 1, "hates": 0, "fears": 0}
SENTENCES = [f"the {one} {verb} the {other}" for one in SUBJECTS for verb in VERBS
             for other in SUBJECTS if one != other]
LABELS = np.array([VERBS[sentence.split()[2]] for sentence in SENTENCES])


def classifier(dropout: float, optimizer: Any) -> Any:
    """Says whether a sentence is kind."""
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
    """Goes on with a sentence; its tokens are single letters and "the"."""
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

    Not with Adam, which makes steps of what rounding leaves of a gradient that is zero in theory,
    as the bias of attention's keys has one.
    """
    alone = make(0.0, keras.optimizers.SGD(0.05, momentum=0.9))
    with strategy.scope():
        together = make(0.0, keras.optimizers.SGD(0.05, momentum=0.9))
    together.set_weights(alone.get_weights())
    train(together, alone, data)
    return together, alone


def train(together: Any, alone: Any, data: tuple[Any, ...]) -> None:
    """The same two epochs for both."""
    for model in (together, alone):
        model.fit(*data, batch_size=common.BATCH, epochs=2, shuffle=False, verbose=0)


def fine_tune(findings: common.Findings, name: str, together: Any, alone: Any,
              data: tuple[Any, ...]) -> None:
    """Two more epochs, of LoRA's weights and the head alone; the backbone stays as it was."""
    for model in (together, alone):
        model.backbone.enable_lora(2)
        # A compiled step has its list of weights: compile again, as on one device.
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), model.loss, jit_compile=False)
    together.set_weights(alone.get_weights())  # what LoRA adds starts at random
    before = [weight.numpy() for weight in together.non_trainable_weights]
    train(together, alone, data)
    added = [weight.numpy() for weight in together.trainable_weights if "lora" in weight.path]
    second = added[1::2]  # of the two factors of each kernel, the one that starts as zeros
    findings.says(f"{name}, LoRA's weights", f"{len(added)}, all trained",
                  bool(second) and all(np.any(factor) for factor in second))
    findings.at_most(f"{name}, fine-tuned by LoRA beside one device's", common.difference(
        together.get_weights(), alone.get_weights()), MOST_DIFFERENCE)
    findings.says(f"{name}, frozen weights", "as before", all(
        np.array_equal(weight.numpy(), old) or "seed" in weight.path
        for weight, old in zip(together.non_trainable_weights, before)))


def main() -> None:
    findings = common.Findings("keras", "keras-hub", "tensorflow-text")
    strategy = common.towers()
    sentences = np.array(SENTENCES)
    for make, data in ((classifier, (sentences, LABELS)), (language_model, (sentences,))):
        name = make.__name__.replace("_", " ")
        together, alone = twins(strategy, make, data)
        findings.at_most(f"{name}, weights beside one device's", common.difference(
            together.get_weights(), alone.get_weights()), MOST_DIFFERENCE)
        with strategy.scope():
            model = make(0.1, keras.optimizers.Adam(5e-3))
        losses = model.fit(*data, batch_size=common.BATCH, epochs=8, verbose=0).history["loss"]
        findings.says(f"{name}, losses", f"{losses[0]:.3f} to {losses[-1]:.3f}",
                      losses[-1] < losses[0])
        if make is classifier:
            kind = np.argmax(model.predict(sentences, batch_size=common.BATCH, verbose=0), axis=1)
            findings.says(f"{name}, right answers", f"{np.mean(kind == LABELS):.0%}",
                          np.mean(kind == LABELS) > 0.9)
        else:
            texts = [made.generate(["the cat", "the dog"], stop_token_ids=None)
                     for made in (together, alone, model)]
            findings.says(f"{name}, generate as on one device", repr(texts[0]),
                          texts[0] == texts[1])
            findings.says(f"{name}, generate", repr(texts[2]), len(texts[2][0]) > len("the cat"))
        fine_tune(findings, name, together, alone, data)
    findings.exit()


if __name__ == "__main__":
    main()
