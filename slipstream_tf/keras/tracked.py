"""Resolves the layers, store and features that an engine tracks."""

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.keras.feature_layouts import resolve_features
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.tables.joined import JoinedStore
from slipstream_tf.tables.sok.store import SokStore
from slipstream_tf.tables.variable import VariableStore


def tracked(
    embeddings: Any,
    features: Mapping[str, str] | Sequence[FeatureSpec] | None,
    comm: Communicator | None,
) -> tuple[tuple[EmbeddingCollection, ...], Any, tuple[FeatureSpec, ...]]:
    """Returns the layers, the store and the features for `Slipstream`.

    If the user passes a store, there are no layers.

    Args:
        embeddings: A layer, multiple layers, or a store.
        features: For a store: the features as a mapping from feature name to table name, or as
            specs. None: one feature per table, with the name of the table.
        comm: The communicator of the job, or None.

    Raises:
        ValueError: The arguments have the wrong type or contradict each other, or two layers have a
            table or feature with the same name.
    """
    given = tuple(embeddings) if isinstance(embeddings, (list, tuple)) else (embeddings,)
    if given and all(isinstance(layer, EmbeddingCollection) for layer in given):
        for name, value in (("features", features), ("comm", comm)):
            if value is not None:
                allowed = f"None. Pass `{name}` to the layer instead"
                raise invalid(name, value, "Slipstream with a layer", allowed)
        specs = tuple(spec for layer in given for spec in layer.specs)
        names = [spec.name for spec in specs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            allowed = (
                "layers with unique feature names. Rename the features, for example by "
                "slip.keras.Embedding(..., name='user')"
            )
            raise invalid("embeddings", twice, "Slipstream", allowed)
        stores = [layer.store for layer in given]
        return given, stores[0] if len(stores) == 1 else JoinedStore(stores), specs
    if isinstance(embeddings, (VariableStore, SokStore)):
        specs = resolve_features(features, embeddings.tables, place="Slipstream")
        return (), embeddings, specs
    allowed = "one or more slipstream_tf.keras.EmbeddingCollection, a VariableStore or a SokStore"
    raise invalid("embeddings", embeddings, "Slipstream", allowed)
