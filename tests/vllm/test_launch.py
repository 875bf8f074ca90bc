"""argv and environment of a vLLM worker."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from tests.vllm.fakes import SECRET
from tollbridge.config.cluster import TlsConfig, TransferConfig
from tollbridge.errors import ConfigError
from tollbridge.vllm.launch import Command, VllmWorker, command, render, transfer_options
from tollbridge.vllm.settings import read_settings

ENVIRON = {"PATH": "/bin", "TOLLBRIDGE_SECRET": SECRET.decode()}


def launch(environ: dict[str, str] | None = None, **changes: Any) -> Command:
    fields: dict[str, Any] = {"model": "m", "host": "0.0.0.0", "port": 8100, "kv_host": "10.0.0.1", "kv_port": 7801}
    return command(VllmWorker(**{**fields, **changes}), environ if environ is not None else ENVIRON)


def option(result: Command, name: str) -> Any:
    return json.loads(result.argv[result.argv.index(name) + 1])


def test_the_connector_reads_what_is_written() -> None:
    result = launch()
    config = option(result, "--kv-transfer-config")
    assert config["kv_connector"] == "TollbridgeConnector"
    assert config["kv_role"] == "kv_both"
    assert config["kv_load_failure_policy"] == "recompute"
    settings = read_settings(config["kv_connector_extra_config"], result.environ)
    assert (settings.kv_host, settings.kv_port, settings.secret) == ("10.0.0.1", 7801, SECRET)


def test_the_secret_stays_in_the_environment() -> None:
    result = launch()
    assert SECRET.decode() not in " ".join(result.argv)
    assert result.environ["TOLLBRIDGE_SECRET"] == SECRET.decode()


def test_the_rest_of_the_argv() -> None:
    argv = launch(served_model_name="chat", extra_args=["--max-model-len", "4096"], python="/py").argv
    assert argv[:3] == ["/py", "-m", "vllm.entrypoints.openai.api_server"]
    assert argv[argv.index("--served-model-name") + 1] == "chat"
    assert argv[-2:] == ["--max-model-len", "4096"]
    assert "--enable-prompt-tokens-details" in argv
    assert "--kv-events-config" not in argv


def test_events() -> None:
    events = option(launch(events_port=5601), "--kv-events-config")
    assert events["endpoint"] == "tcp://*:5601"
    assert events["replay_endpoint"] == "tcp://*:5602"
    assert events["enable_kv_cache_events"] is True


def test_service_links_are_dropped() -> None:
    links = {"VLLM_PORT": "tcp://10.0.0.2:80", "VLLM_PORT_80_TCP": "x", "VLLM_SERVICE_HOST": "10.0.0.2"}
    environ = launch({**ENVIRON, **links, "VLLM_LOGGING_LEVEL": "DEBUG"}).environ
    assert not links.keys() & environ.keys()
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert launch({**ENVIRON, "VLLM_PORT": "5000"}).environ["VLLM_PORT"] == "5000"


def test_keep_alive_outlives_the_routers() -> None:
    assert int(launch().environ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) >= 60


def test_on_a_cpu() -> None:
    environ = launch(target="cpu", threads=1, kv_cache_gib=1).environ
    assert environ["VLLM_TARGET_DEVICE"] == "cpu"
    assert environ["OMP_NUM_THREADS"] == "1"
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "VLLM_TARGET_DEVICE" not in launch().environ


@pytest.mark.parametrize(("media", "name"), [("nixl", "NixlConnector"), ("nixl-push", "NixlPushConnector")])
def test_nixl(media: str, name: str) -> None:
    result = launch(media=media)
    assert option(result, "--kv-transfer-config")["kv_connector"] == name
    assert result.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"


def test_an_address_that_nobody_can_dial() -> None:
    with pytest.raises(ConfigError, match="name one"):
        launch(media="nixl", kv_host="0.0.0.0")
    assert launch(kv_host="0.0.0.0").argv
    assert launch(media="nixl", kv_host="node-a").argv


def test_what_the_command_sets_is_not_handed_over_again() -> None:
    with pytest.raises(ConfigError, match=r"^--kv-transfer-config is set by this command.*see --connector"):
        launch(extra_args=["--dtype", "float16", "--kv_transfer_config={}"])


def test_rendered_it_is_one_shell_command() -> None:
    environ = {**ENVIRON, "VLLM_PORT": "tcp://10.0.0.2:80"}
    text = render(launch(environ, python="/py", extra_args=["--max-model-len", "4096"]), environ)
    words = shlex.split(text.replace("\\\n", " "))
    assert words[:4] == ["env", "-u", "VLLM_PORT", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE=300"]
    assert words[4:] == launch(environ, python="/py", extra_args=["--max-model-len", "4096"]).argv
    assert SECRET.decode() not in text
    assert text.splitlines()[-1] == "  --max-model-len 4096"


def test_the_section_transfer_of_a_cluster_file_reaches_the_connector() -> None:
    tls = TlsConfig(cert="/c.pem", key="/k.pem", ca="/ca.pem")
    section = TransferConfig(media="tcp", io="threads", streams=3, ring_mib=64, bandwidth_cap=1_000_000, tls=tls)
    result = launch(transfer=transfer_options(section))
    settings = read_settings(option(result, "--kv-transfer-config")["kv_connector_extra_config"], result.environ)
    assert settings.tls is not None and (settings.tls.cert, settings.tls.key, settings.tls.ca) == (
        "/c.pem",
        "/k.pem",
        "/ca.pem",
    )
    assert settings.transfer == {
        "media": "tcp",
        "io": "threads",
        "streams": 3,
        "ring_bytes": 64 << 20,
        "bandwidth_cap_bytes_per_s": 1_000_000,
    }
    assert transfer_options(TransferConfig()) == {}


def test_what_a_stock_connector_does_not_heed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(media\), which vLLM's own connector nixl does not heed"):
        launch(media="nixl", transfer=transfer_options(TransferConfig(media="tcp")))


def test_what_blinds_the_router_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--disable-log-stats takes away the metrics .*: leave it out\."):
        launch(extra_args=["--disable_log_stats"])
