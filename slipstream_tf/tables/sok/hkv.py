"""Validates settings of HierarchicalKV (HKV) tables and computes their memory.

SOK does not validate the keyword arguments of `sok.DynamicVariable(..., var_type="hybrid")`. This
module needs neither SOK nor a GPU.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from slipstream_tf._utils.errors import invalid, require_integer, require_number

# Number of rows, and GiB of GPU memory for row values, that SOK reserves for a table by default.
DEFAULT_CAPACITY = 64 << 20
DEFAULT_HBM_GIB = 16
_CAPACITIES = ("init_capacity", "max_capacity")
_OTHERS = ("max_hbm_for_vectors", "max_load_factor", "max_bucket_size", "block_size", "io_by_cpu")
# Names of the settings that SOK reads correctly.
NAMES = (*_CAPACITIES, *_OTHERS)
# SOK 2.1.0 reads the value of the other setting instead, and crashes if it is missing.
_MISREAD = {"evict_strategy": "io_by_cpu", "device_id": "block_size"}
# Bytes per key in addition to its values: the key, its score and its digest.
_KEY_BYTES = 8 + 8 + 1


class HkvMemory(NamedTuple):
    """Memory of a full table, in bytes.

    Attributes:
        gpu: Keys, and the rows that fit into `max_hbm_for_vectors`.
        host: The remaining rows.
    """

    gpu: int
    host: int


def require_settings(settings: Mapping[str, Any], place: str, are_capacities_needed: bool) -> None:
    """Validates the settings of an HKV table.

    Args:
        settings: Keyword arguments of `sok.DynamicVariable` that are passed to HKV.
        place: Name of the table, for error messages.
        are_capacities_needed: Whether both capacities are required.

    Raises:
        ValueError: SOK would ignore or misread a setting, a capacity is missing or not a power of
            two, or a value is out of range.
    """
    for name in settings:
        if name in _MISREAD:
            allowed = (
                f"no such setting, because SOK 2.1.0 reads the value of {_MISREAD[name]!r} "
                "instead. Rows are always evicted by age, and tables use the current GPU"
            )
            raise invalid(name, settings[name], place, allowed)
        if name not in NAMES:
            raise invalid("settings", name, place, "one of " + ", ".join(map(repr, NAMES)))
    for name in (*_CAPACITIES, "max_bucket_size", "block_size"):
        if name in settings:
            require_power_of_two(name, settings[name], place)
        elif name in _CAPACITIES and are_capacities_needed:
            allowed = f"a power of two. Otherwise, SOK reserves {DEFAULT_CAPACITY:,} rows"
            raise invalid(name, None, place, allowed)
    first, maximum = (settings.get(name, DEFAULT_CAPACITY) for name in _CAPACITIES)
    if first > maximum:
        allowed = f"an integer <= max_capacity, which is {maximum:,}"
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
    """Returns the memory of a full table on each rank.

    Args:
        settings: Settings that passed `require_settings`.
        dim: Number of values per row.
        slots: Number of slots of the optimizer, for example 2 for Adam. SOK stores each slot in a
            separate table with the same settings.
    """
    capacity = settings.get("max_capacity", DEFAULT_CAPACITY)
    rows = 4 * dim * capacity
    on_gpu = min(rows, settings.get("max_hbm_for_vectors", DEFAULT_HBM_GIB) << 30)
    tables = 1 + slots
    return HkvMemory(tables * (on_gpu + capacity * _KEY_BYTES), tables * (rows - on_gpu))
