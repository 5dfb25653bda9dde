"""Drops examples from a `tf.data` pipeline, refills the batches and reads ahead."""
