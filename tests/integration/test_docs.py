"""The site's settings, flags, links and code blocks match the code.

Some pages are run in full. `make docs` checks the targets of links. The tests need the packages in
DOC_TOOLS (see the Makefile).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import re
import shlex

import pytest

from slipstream_tf.cli import train

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
# Pages with code that is run: the quick start, and pages with more code than README.md. A test of
# SOK runs sok.md.
RUN = ("index.md", "using/checkpoints.md", "using/plain_keras.md")
BLOCK = re.compile(r"^``` ?(?:\{ \.)?(\w*)(?: \})?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MADE = "run: python docs/settings_table.py"


def program(name, folder=DOCS):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def site():
    return program("hooks").Site({page: (DOCS / page).read_text() for page in PAGES})


@pytest.fixture(scope="module")
def settings_table():
    return program("settings_table")


def blocks(site, page, *kinds):
    text = site.expand(page, (DOCS / page).read_text())
    return [block for kind, block in BLOCK.findall(text) if kind in kinds]


def test_settings_page_matches_code(settings_table):
    assert (DOCS / "settings.md").read_text() == settings_table.page(), MADE


def test_settings_advice_covers_exactly_existing_settings(settings_table):
    when, config = settings_table.when, settings_table
    classes = {cls.__name__: cls for cls in config.CLASSES}
    assert set(when.CLASSES) == set(classes)
    for name, advice in when.CLASSES.items():
        assert set(advice) == {field.name for field in dataclasses.fields(classes[name])}
    flags = {name for group in config.flag_groups().values() for name, _, _ in group}
    assert set(when.FLAGS) | set(when.FLAGS_OF_SETTINGS) == flags
    for setting in when.FLAGS_OF_SETTINGS.values():
        name, _, field = setting.partition(".")
        assert field in (*when.CLASSES[name], ""), setting


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_compile(site, page):
    for block in blocks(site, page, "python"):
        compile(block, page, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_documented_flags_exist(site, page):
    flags = train.make_flags()
    for block in blocks(site, page, "", "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "slipstream-train" in words:
                flags.parse(words[words.index("slipstream-train") + 1 :])


@pytest.mark.parametrize("page", RUN)
def test_page_examples_run(site, page, tmp_path, monkeypatch, capsys):
    found = blocks(site, page, "python")
    assert found
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(found), page, "exec"), {"__name__": "page"})
    if page != "using/checkpoints.md":
        assert "have been" in capsys.readouterr().out


def test_tfrecord_and_libffm_are_converted_to_json_lines(site, tmp_path, monkeypatch):
    import tensorflow as tf

    monkeypatch.chdir(tmp_path)
    integers = lambda values: tf.train.Feature(int64_list=tf.train.Int64List(value=values))  # noqa: E731
    users = [{}, {"user": tf.train.Feature(bytes_list=tf.train.BytesList(value=["é".encode()]))}]
    with tf.io.TFRecordWriter("clicks.tfrecord") as writer:
        for click, user in enumerate(users):
            columns = {"click": integers([click]), "tags": integers([7, -1][:click]), **user}
            example = tf.train.Example(features=tf.train.Features(feature=columns))
            writer.write(example.SerializeToString())
    pathlib.Path("train.ffm").write_text("1 0:12:1 1:7:1 2:3:1 2:4:1\n-1 0:5:1\n")
    for block in blocks(site, "using/data.md", "python"):
        if "json.dumps" in block:
            exec(compile(block, "using/data.md", "exec"), {})
    found = [
        [json.loads(line) for line in pathlib.Path(name).read_text().splitlines()]
        for name in ("clicks.jsonl", "train.jsonl")
    ]
    assert found == [
        [{"click": 0, "user": "", "tags": []}, {"click": 1, "user": "é", "tags": [7]}],
        [
            {"click": "1", "user": ["12"], "ad": ["7"], "tags": ["3", "4"]},
            {"click": "-1", "user": ["5"], "ad": [], "tags": []},
        ],
    ]


def test_snippets_are_included(site):
    for page in PAGES:
        left = [
            line
            for line in site.expand(page, (DOCS / page).read_text()).splitlines()
            if "--8" in line
        ]
        assert not [line for line in left if not line.startswith("<!-- --8<-- [")], page
    loop = blocks(site, "using/own_loop.md", "python")
    assert [block.strip() for block in loop] == [
        (ROOT / "examples" / "own_training_loop.py").read_text().strip()
    ]


def test_links_are_converted_for_site(site):
    assert "](measuring.md)" in site.expand("limits.md", (DOCS / "limits.md").read_text())
    expanded = site.expand("results.md", (DOCS / "results.md").read_text())
    assert "](repository/benchmarks/results/frontier_globo.png)" in expanded
    assert "](limits.md#a-single-pass)" in site.expand("sok.md", (DOCS / "sok.md").read_text())


def test_broken_link_raises(site):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.md"):
        site.expand("faq.md", "[there](nowhere.md)")
