"""The alert rules and the dashboard in docs/monitoring: each alert fires, and each metric in them exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hub_statuses import DAY, client, hub, pipeline
from prometheus_client.parser import text_string_to_metric_families

from hub.client.ship_metrics import exposition
from hub.client.ship_state import ShipState
from hub.client.ship_status import MirrorStatus, ShipStatus
from hub.protocol.status import ReaderStatus
from hub.web import metrics

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
ALERTS = re.findall(r"- alert: (\w+)", (MONITORING / "alerts.yml").read_text())
NAME = re.compile(r"\bkvspool_\w+")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_each_alert_fires_from_bad_samples_and_none_from_healthy_ones() -> None:
    done = subprocess.run(["promtool", "check", "rules", "alerts.yml"], cwd=MONITORING, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout
    done = subprocess.run(["promtool", "test", "rules", "alerts.test.yml"], cwd=MONITORING, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_that_fires_it_and_one_that_does_not() -> None:
    names = re.findall(r"- name: (.+)", (MONITORING / "alerts.test.yml").read_text())
    assert ALERTS
    assert names == [f"{alert} {words}" for alert in ALERTS for words in ("fires", "does not fire")]


def exposed() -> set[str]:
    """Return the names of all metrics of hubs, shippers and mirrors."""
    everything = hub(
        [client("JFK", quota_bytes=1, refused={"quota": 1})],
        cut={"idle": 1},
        readers=[ReaderStatus(name="spark", lag=1)],
        pipelines=[pipeline("delays")],
        calls=1,
        threads=1,
        refusals={"full": 1},
        certificate_expires=DAY,
    )
    shipper = ShipStatus("JFK", "grpc://hub:7070", "connected", 0, 0, 0, 0, 0, 0.0, "", [])
    mirror = MirrorStatus("grpc://hub:7070", "/mirror", "connected", 0, 0, 0, 0, 0, 0.0, "", [])
    texts = metrics.exposition(everything).decode() + exposition(ShipState([shipper], [mirror])).decode()
    return {sample.name for family in text_string_to_metric_families(texts) for sample in family.samples}


@pytest.mark.parametrize("name", ["alerts.yml", "alerts.test.yml", "dashboard.json"])
def test_every_metric_of_rules_and_dashboard_exists(name: str) -> None:
    used = set(NAME.findall((MONITORING / name).read_text()))
    assert used
    assert used <= exposed()


def test_the_dashboard_is_complete_json_with_a_query_in_each_panel() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        assert panel["title"] and all(target["expr"] for target in panel["targets"])
