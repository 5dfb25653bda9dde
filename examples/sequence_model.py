"""Predicts a user's next item with attention over the history, like SASRec.

Run: python examples/sequence_model.py

`combiner=None` returns the history unpooled as [batch, length, dim], with a Keras mask for padding.
Histories and target items share a table. If a key occurs at multiple positions, its gradients are
summed into a single update. In the generated data, users walk through a ring of items, mostly one
step at a time. The example prints the test AUC, which is about the probability that the next item
has a higher score than a random item.
"""

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip

ITEMS, LENGTH, DIM, BATCH = 500, 12, 16, 128


def make_data(users: int, seed: int) -> tf.data.Dataset:
    """Returns histories with items and labels.

    Histories are padded with 0 on the left. The label is 1 if the item is the next item of the
    walk, and 0 if it is a random item.
    """
    rng = np.random.default_rng(seed)
    steps = rng.choice([1, 1, 1, 2], (users, LENGTH + 1))
    walks = (rng.integers(0, ITEMS, (users, 1)) + np.cumsum(steps, axis=1)) % ITEMS + 1
    lengths = rng.integers(2, LENGTH + 1, users)
    is_present = np.arange(LENGTH) >= LENGTH - lengths[:, None]
    history = np.where(is_present, walks[:, :-1], 0)
    is_right = rng.random(users) < 0.5
    item = np.where(is_right, walks[:, -1], rng.integers(1, ITEMS + 1, users))
    features = {"history": history, "item": item, "hour": rng.random((users, 1), np.float32)}
    label = is_right.astype(np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices((features, label)).batch(BATCH, drop_remainder=True)


class NextItem(keras.Model):
    """Scores an item by its similarity to the history's attention output."""

    def __init__(self, embeddings: slip.keras.EmbeddingCollection) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.places = self.add_weight(shape=(LENGTH, DIM), initializer="uniform", name="places")
        self.attention = keras.layers.MultiHeadAttention(2, DIM // 2)
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.inner = keras.layers.Dense(2 * DIM, activation="relu")
        self.outer = keras.layers.Dense(DIM)
        self.top = keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs: dict[str, tf.Tensor], training: bool | None = None) -> tf.Tensor:
        """Returns click probabilities [batch, 1] for a dictionary of features.

        The embedding layer ignores the entry "hour", because it selects its features by name.
        """
        vectors = self.embeddings(inputs, training=training)
        history = vectors["history"]  # [batch, length, dim], with a mask for padding.
        is_present = inputs["history"] > 0
        steps = history + self.places
        attended = self.attention(
            steps, steps, attention_mask=is_present[:, None], training=training
        )
        steps = self.norms[0](steps + attended)
        steps = self.norms[1](steps + self.outer(self.inner(steps)))
        last = steps[:, -1]
        likeness = tf.reduce_sum(last * vectors["item"], axis=1, keepdims=True)
        return self.top(tf.concat([likeness, last * vectors["item"], inputs["hour"]], axis=1))


def main() -> None:
    """Trains the model and prints the AUC on new users."""
    keras.utils.set_random_seed(1)
    embeddings = slip.keras.EmbeddingCollection(
        [slip.Table("items", DIM)],
        optimizer=slip.optimizers.Adam(0.01),
        features=[
            slip.FeatureSpec("history", "items", combiner=None, padding_key=0),
            slip.FeatureSpec("item", "items", padding_key=0),
        ],
    )
    model = NextItem(embeddings)
    model.compile(keras.optimizers.Adam(0.005), "binary_crossentropy", metrics=["AUC"])
    model.fit(make_data(12_800, seed=1), epochs=5, verbose=2)
    result = model.evaluate(make_data(2_560, seed=2), verbose=0, return_dict=True)
    print(f"test AUC {result['AUC']:.3f}, {embeddings.store.size('items')} items")


if __name__ == "__main__":
    main()
