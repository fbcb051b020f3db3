"""The run browser: every run is listed, and the chosen one is in its panel."""

import shutil

import pytest
from test_charts import START, say, step_event
from waiting import until

from upsnb.errors import RunError
from upsnb.runs import runfolder
from upsnb.widgets.browser import RunBrowser


@pytest.fixture
def root(tmp_path, tiny_config):
    """Two ended runs and a damaged one."""
    for number, name in enumerate(("old", "new")):
        folder = runfolder.create(tiny_config(), tmp_path / name)
        say(folder, START, *(step_event(k) for k in range(1, 21)))
        runfolder.update_manifest(folder, status="failed", cause="rank 0 raised ValueError", created=1.7e9 + number)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    return tmp_path


def names(browser: RunBrowser) -> list:
    return [name for _, name in browser._list.options]


def test_runs_are_listed_newest_first_and_what_is_damaged_says_so(root):
    browser = RunBrowser(root)
    assert [name for name in names(browser) if name] == ["new", "old"]
    texts = [text for text, _ in browser._list.options]
    assert any(text.startswith("damaged") and "unreadable" in text and "not JSON" in text for text in texts)
    assert any("failed" in text and "20 steps" in text and "rank 0 raised ValueError" in text for text in texts)


def test_choosing_a_run_opens_its_panel_and_another_replaces_it(root):
    browser = RunBrowser(root)
    assert browser._place.children == () and browser.panel is None
    for name in ("old", "new", "old"):
        browser._list.value = name
        assert browser.panel.run.folder == root / name
        assert browser._place.children == (browser.panel.box,) and name in browser.panel._head.value
    browser._list.value = None
    assert browser._place.children == () and browser.panel is None


def test_looking_again_finds_new_runs_and_keeps_the_choice(root, tiny_config):
    browser = RunBrowser(root)
    browser._list.value = "old"
    chosen = browser.panel
    runfolder.create(tiny_config(), root / "newest")
    browser.look()
    assert "newest" in names(browser)
    assert browser._list.value == "old" and browser.panel is chosen


def test_chosen_run_is_kept_up_to_date(root, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "test")
    monkeypatch.setattr("upsnb.widgets.browser.display", lambda value: None)
    browser = RunBrowser(root)
    browser._list.value = "old"
    browser._ipython_display_()
    try:
        say(root / "old", *(step_event(k) for k in range(21, 31)))
        until(lambda: "<b>30</b>" in browser.panel._head.value)
    finally:
        browser.close()


def test_a_run_that_is_deleted_says_so_and_the_next_choice_is_kept_up_to_date(root, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "test")
    monkeypatch.setattr("upsnb.widgets.browser.display", lambda value: None)
    browser = RunBrowser(root)
    browser._list.value = "new"
    gone = browser.panel
    browser._ipython_display_()
    try:
        shutil.rmtree(root / "new")
        until(lambda: "the panel stopped" in gone._note.value)
        browser._list.value = "old"
        say(root / "old", *(step_event(k) for k in range(21, 31)))
        until(lambda: "<b>30</b>" in browser.panel._head.value)
    finally:
        browser.close()


def test_without_a_browser_the_table_is_shown(root, monkeypatch):
    shown = []
    monkeypatch.setattr("upsnb.widgets.browser.display", shown.append)
    RunBrowser(root)._ipython_display_()
    assert sorted(shown[0]["run"]) == ["damaged", "new", "old"]


def test_no_folder_is_an_error(tmp_path):
    with pytest.raises(RunError, match="no such folder"):
        RunBrowser(tmp_path / "nowhere")
