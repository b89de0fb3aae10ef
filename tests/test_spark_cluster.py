"""docs/cluster.md, followed to the letter on seven hosts with a failing network: a slice of tools/faults/spark_cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))

from hosts import Cluster, NoNamespaces  # noqa: E402
from hosts.procedures import Procedures, Step, steps_of  # noqa: E402

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


def test_each_block_of_the_page_is_a_command_or_a_file() -> None:
    steps = [step for section in steps_of(PAGE).values() for step in section]
    assert PAGE.count("```") == 2 * (PAGE.count("```console\n") + sum(bool(step.name) for step in steps))
    assert sum(step.text.endswith(" &") for step in steps) == 8, "hub, two shippers, master, two workers, pipeline, Spark Connect"


def test_a_prompt_names_the_hosts_of_a_command() -> None:
    steps = steps_of("## A\n```console\na,b$ echo $HOME && ls\n```\n## B\n```python\n# a: b.py\nprint(1)\n```\n")
    assert steps["A"] == [Step(("a", "b"), "echo $HOME && ls")]
    assert steps["B"] == [Step(("a",), "# a: b.py\nprint(1)\n", "b.py")]
    with pytest.raises(ValueError, match="has no prompt"):
        steps_of("```console\nls\n```\n")


@pytest.mark.spark
@pytest.mark.timeout(960)  # seven hosts, eight JVMs
@pytest.mark.skipif(bool(os.environ.get("KVSPOOL_NO_EXTENSIONS")), reason="networks are tested with the compiled twin")
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("pyspark", "grpc", "grpc_status", "pandas", "zstandard")),
    reason="needs PySpark and what its client of Spark Connect needs",
)
def test_hub_table_job_and_query_have_each_record_once_though_hosts_and_links_fail() -> None:
    try:
        with Cluster(["a"]) as cluster:
            Procedures(cluster, ROOT / "docs" / "cluster.md", {}).close()
    except NoNamespaces as error:
        pytest.skip(str(error))
    words = [sys.executable, str(ROOT / "tools" / "faults" / "spark_cluster"), "1", "--seed", "6", "--longest", "0.3", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    counts = json.loads(done.stdout)
    assert sum(count for name, count in counts.items() if name.startswith("end of all processes of")) == 1
    assert counts["records"] == counts["records of the table"] == counts["records of the job"] == counts["records of the query"] > 100
    assert sum(counts[f"packets {name}"] for name in ("cut", "lost", "delayed", "reordered", "duplicated"))
