"""Logs for the tests of programs that use kvspool: fixtures of pytest, in memory-backed storage.

pytest_plugins = ["kvspool.testing"]    # in conftest.py

def test_it(kvspool_log):
    my_program.run(kvspool_log.path)
    assert [record.data for record in kvspool_log.read()] == ["done"]
"""

from kvspool.testing.fixtures import kvspool_directory, kvspool_log, make_kvspool_log

__all__ = ["kvspool_directory", "kvspool_log", "make_kvspool_log"]
