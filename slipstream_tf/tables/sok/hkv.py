"""Settings of HierarchicalKV (HKV) tables, which SOK takes as they come: checked before it does.

In: the keyword arguments of `sok.DynamicVariable(..., var_type="hybrid")`. Out: an error that says
what is allowed, or the memory that such a table takes. Pure: neither SOK nor a GPU is needed.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from slipstream_tf._utils.errors import invalid, require_integer, require_number

# Rows that SOK gives a table without capacities.
DEFAULT_CAPACITY = 64 << 20
DEFAULT_HBM_GIB = 16
_CAPACITIES = ("init_capacity", "max_capacity")
_OTHERS = ("max_hbm_for_vectors", "max_load_factor", "max_bucket_size", "block_size", "io_by_cpu")
NAMES = (*_CAPACITIES, *_OTHERS)
# SOK 2.1.0 reads the value of another setting in their place, or none: the program dies.
_MISREAD = {"evict_strategy": "io_by_cpu", "device_id": "block_size"}
# Of a key, beside its values: the key, its score and its digest.
_KEY_BYTES = 8 + 8 + 1


class HkvMemory(NamedTuple):
    """Bytes that a table of full capacity takes.

    Attributes:
        gpu: keys, and as many rows as fit `max_hbm_for_vectors`.
        host: the other rows.
    """

    gpu: int
    host: int


def require_settings(settings: Mapping[str, Any], place: str, are_capacities_needed: bool) -> None:
    """Checks the settings of an HKV table.

    Args:
        settings: keyword arguments of `sok.DynamicVariable`, those that go to HKV.
        place: what they belong to, for errors.
        are_capacities_needed: whether both capacities must be there.

    Raises:
        ValueError: a name that SOK would pass over, or misread; a capacity that is no power of two,
            or missing; a value out of range.
    """
    for name in settings:
        if name in _MISREAD:
            allowed = (
                f"not to be set: SOK 2.1.0 reads the value of {_MISREAD[name]!r} in its place "
                "(rows are always evicted by age, on the current GPU)"
            )
            raise invalid(name, settings[name], place, allowed)
        if name not in NAMES:
            raise invalid("settings", name, place, "one of " + ", ".join(map(repr, NAMES)))
    for name in (*_CAPACITIES, "max_bucket_size", "block_size"):
        if name in settings:
            require_power_of_two(name, settings[name], place)
        elif name in _CAPACITIES and are_capacities_needed:
            allowed = f"a power of two; without it SOK reserves {DEFAULT_CAPACITY:,} rows"
            raise invalid(name, None, place, allowed)
    first, most = (settings.get(name, DEFAULT_CAPACITY) for name in _CAPACITIES)
    if first > most:
        allowed = f"at most max_capacity, which is {most:,}"
        raise invalid("init_capacity", first, place, allowed)
    if "max_hbm_for_vectors" in settings:
        require_integer("max_hbm_for_vectors", settings["max_hbm_for_vectors"], 0, None, place)
    if "max_load_factor" in settings:
        value = settings["max_load_factor"]
        require_number("max_load_factor", value, 0.0, 1.0, place, open_minimum=True)
    if not isinstance(settings.get("io_by_cpu", False), bool):
        raise invalid("io_by_cpu", settings["io_by_cpu"], place, "True or False")


def require_power_of_two(name: str, value: Any, place: str) -> None:
    """Raises ValueError unless `value` is a power of two."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and value > 0 and value & (value - 1) == 0:
        return
    near = f", such as {1 << value.bit_length():,}" if is_integer and value > 0 else ""
    raise invalid(name, value, place, f"a power of two{near}")


def memory(settings: Mapping[str, Any], dim: int, slots: int = 0) -> HkvMemory:
    """Returns the bytes of a table at its full capacity, on each rank.

    Args:
        settings: as checked by `require_settings`.
        dim: values per row.
        slots: of the optimizer: SOK keeps each in a table of its own, with the same settings.
    """
    capacity = settings.get("max_capacity", DEFAULT_CAPACITY)
    rows = 4 * dim * capacity
    on_gpu = min(rows, settings.get("max_hbm_for_vectors", DEFAULT_HBM_GIB) << 30)
    tables = 1 + slots
    return HkvMemory(tables * (on_gpu + capacity * _KEY_BYTES), tables * (rows - on_gpu))
