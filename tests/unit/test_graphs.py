"""The pictures of the rooms show the sources as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.mark.parametrize("kind", ["includes", "imports"])
def test_pictures_of_rooms_are_drawn_from_the_sources(kind: str) -> None:
    spec = importlib.util.spec_from_file_location("graphs", PICTURES / "graphs.py")
    assert spec is not None and spec.loader is not None
    graphs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(graphs)
    drawn = graphs.picture_of(kind).svg()
    assert "none points up" in drawn
    stored = (PICTURES / f"{kind}.svg").read_text(encoding="utf-8")
    assert stored == drawn, "run python docs/pictures/graphs.py"
