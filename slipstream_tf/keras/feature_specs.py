"""From what a user says about features to `FeatureSpec`s. In: `features` and tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream_tf._utils.errors import invalid, require_choice, require_integer
from slipstream_tf.config import COMBINERS, Table
from slipstream_tf.ops.features import PADDING_KEY, FeatureSpec

_LAYER = "EmbeddingCollection"


def resolve_tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    """Checks the tables of one layer.

    Args:
        tables: one table or more, with different names.

    Returns:
        The tables as a tuple.

    Raises:
        ValueError: there is none, one is no Table, or a name comes twice.
    """
    given = tuple(tables) if isinstance(tables, Iterable) else (tables,)
    wrong = [table for table in given if not isinstance(table, Table)]
    if wrong or not given:
        raise invalid("tables", wrong or tables, _LAYER, "one slipstream_tf.Table or more")
    names = [table.name for table in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise invalid("tables", twice, _LAYER, "tables with different names")
    return given


def resolve_features(
    features: Any, tables: Sequence[Table], padding_key: int | None = PADDING_KEY
) -> tuple[FeatureSpec, ...]:
    """Turns the `features` argument of `EmbeddingCollection` into specs.

    Args:
        features: None (a feature per table, of its name and combiner), a dictionary from feature
            name to table name (the table's combiner), or a sequence of FeatureSpec (its own
            combiner).
        tables: the tables that features may name.
        padding_key: of features that are no FeatureSpec.

    Returns:
        One spec per feature, in order.

    Raises:
        ValueError: a table is unknown, a feature comes twice, or the argument is something else.
    """
    by_name = {table.name: table for table in tables}
    if features is None:
        features = {name: name for name in by_name}
    if isinstance(features, Mapping):
        for name, table in features.items():
            _require_table(name, table, by_name)
        tables_of = {name: by_name[table] for name, table in features.items()}
        specs = [FeatureSpec(n, t.name, t.combiner, padding_key) for n, t in tables_of.items()]
    else:
        specs = list(features) if isinstance(features, Sequence) else [features]
        if padding_key != PADDING_KEY:
            allowed = "left out: each FeatureSpec has its own"
            raise invalid("padding_key", padding_key, f"{_LAYER} with features=", allowed)
    wrong = [spec for spec in specs if not isinstance(spec, FeatureSpec)]
    if wrong or not specs:
        allowed = "None, a dictionary from feature name to table name, or a sequence of FeatureSpec"
        raise invalid("features", wrong or features, _LAYER, allowed)
    names = [spec.name for spec in specs]
    for spec in specs:
        if not isinstance(spec.name, str) or not spec.name:
            raise invalid("features", spec.name, _LAYER, "non-empty names")
        if names.count(spec.name) > 1:
            raise invalid("features", spec.name, _LAYER, "each feature once")
        _require_table(spec.name, spec.table, by_name)
        require_choice("combiner", spec.combiner, COMBINERS, f"feature {spec.name!r}")
        if spec.padding_key is not None:
            bounds = (-(1 << 63), (1 << 63) - 1)
            require_integer("padding_key", spec.padding_key, *bounds, f"feature {spec.name!r}")
    return tuple(specs)


def _require_table(feature: str, table: Any, by_name: Mapping[str, Table]) -> None:
    if table not in by_name:
        allowed = "one of the tables " + ", ".join(repr(name) for name in by_name)
        raise invalid("table", table, f"feature {feature!r}", allowed)
