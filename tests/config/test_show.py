"""What is printed or dumped reads back as the same configuration."""

from __future__ import annotations

from pathlib import Path

from tollbridge.config.cluster import ClusterConfig, LinkConfig, RouterConfig, TenantConfig
from tollbridge.config.load import Loaded, load
from tollbridge.config.show import dump, render


def test_the_print_reads_back_and_names_sources(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("workers: [{name: a, cores: [1]}]\nlinks: [{from: localhost, to: localhost}]")
    loaded = load(path, environ={"TOLLBRIDGE_MODEL": "m"})
    text = render(loaded)
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load(again, environ={}).cluster == loaded.cluster
    lines = {line.split(":")[0].strip(" -"): line for line in text.splitlines()}
    assert lines["model"].endswith("# TOLLBRIDGE_MODEL")
    assert lines["cores"].endswith(f"# {path}")
    assert lines["port"].endswith("# default")


def test_api_keys_are_not_printed() -> None:
    tenants = [TenantConfig(name="a", keys=["sk-hidden-too"])]
    router = RouterConfig(api_keys=["sk-hidden"], tenants=tenants)
    text = render(Loaded(cluster=ClusterConfig(router=router), sources={}))
    assert "sk-hidden" not in text
    assert '"a"' in text


def test_a_dump_reads_back_and_is_private(tmp_path: Path) -> None:
    cluster = ClusterConfig(links=[LinkConfig(from_host="node-a", to_host="node-a", goodput_bytes_per_s=1e9)])
    path = tmp_path / "cluster.yaml"
    dump(cluster, path)
    assert load(path, environ={}).cluster == cluster
    assert path.stat().st_mode & 0o777 == 0o600
