"""Precedence, and the one sentence that each mistake gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tollbridge.config.cluster import ClusterConfig, RouterConfig
from tollbridge.config.load import Loaded, Override, load, variables
from tollbridge.errors import ConfigError


@pytest.fixture
def cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("cluster.yaml")


def load_text(path: Path, text: str, **environ: str) -> Loaded:
    path.write_text(text)
    return load(path, environ=environ)


def refusal(path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(path, text)
    assert caught.value.exit_code == 2
    return caught.value.message


def test_no_file_means_one_prefill_and_one_decode_worker(cluster_file: Path) -> None:
    loaded = load(environ={})
    assert loaded.cluster == ClusterConfig()
    assert [worker.prefer for worker in loaded.cluster.workers] == ["prefill", "decode"]
    assert loaded.source("router.port") == "default"


def test_tollbridge_yaml_of_the_current_folder_is_read(cluster_file: Path) -> None:
    Path("tollbridge.yaml").write_text("model: here")
    assert load(environ={}).cluster.model == "here"


def test_flag_beats_variable_beats_file_beats_default(cluster_file: Path) -> None:
    cluster_file.write_text("router: {port: 1, host: 0.0.0.0, max_concurrent: 3}\nmodel: a")
    environ = {"TOLLBRIDGE_ROUTER_PORT": "2", "TOLLBRIDGE_ROUTER_HOST": "127.0.0.2"}
    loaded = load(cluster_file, environ=environ, overrides=[Override(path="router.port", value=3, flag="--port")])
    assert loaded.cluster.router == RouterConfig(port=3, host="127.0.0.2", max_concurrent=3)
    sources = [loaded.source(f"router.{key}") for key in ("port", "host", "max_concurrent", "policy")]
    assert sources == ["--port", "TOLLBRIDGE_ROUTER_HOST", "cluster.yaml", "default"]


def test_a_file_with_comments_only_is_all_defaults(cluster_file: Path) -> None:
    assert load_text(cluster_file, "# nothing yet\n").cluster == ClusterConfig()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("router: {prot: 1}", "router.prot is no key of the cluster file: did you mean router.port?"),
        ("routr: {port: 1}", "routr is no key of the cluster file: did you mean router?"),
        ("kv_cache_mib: 4", "kv_cache_mib is no key of the cluster file: did you mean engine.kv_cache_mib?"),
        ("workers: [{nam: x}]", "workers[0].nam is no key of the cluster file: did you mean workers[0].name?"),
        ("router: 5", "router must be a mapping of keys to values."),
        ("workers: [5]", "workers[0] must be a mapping of keys to values."),
        ("router: {port: abc}", 'router.port is "abc", but must be a whole number from 0 to 65535.'),
        ("router: {port: 70000}", "router.port is 70000, but must be a whole number from 0 to 65535."),
        ("router: {tls: {cert: 5}}", "router.tls is {\"cert\": 5}, but must be a mapping of keys to values or null."),
        ("slo: {ttft_s: -1}", "slo.ttft_s is -1, but must be a number above 0."),
        ("slo: {ttft_s: .nan}", "slo.ttft_s is NaN, but must be a number above 0."),
        ("transfer: {streams: 0}", 'transfer.streams is 0, but must be "auto" or a whole number of at least 1.'),
        ("engine: {threads: 100000000}", "threads is 100000000, but must be a whole number from 1 to 1024 or null."),
        ("router: {on_no_prefill: no}", 'router.on_no_prefill is false, but must be "local" or "fail".'),
        ("workers: 3", "workers is 3, but must be a list."),
        ("model: ''", 'model is empty: name a model, such as "smollm2".'),
        ("router: {host: ''}", 'router.host is empty: name an address, such as "127.0.0.1".'),
        ("secret: {env: null}", "secret names neither env nor file: set one of them."),
        ("workers: []", "workers is empty: list at least one worker."),
        ("workers: [{prefer: decode}]", "workers[0] lacks the key name."),
        ("workers: [{name: a, cores: [-1]}]", "workers[0].cores[0] is -1, but must be a whole number of at least 0."),
        (
            "workers: [{name: a, connector: nixl}]",
            'workers[0].connector is "nixl", which only vLLM has: write engine: vllm, or leave the key out.',
        ),
        ("workers: [{name: a, cores: []}]", "workers[0].cores is an empty list: name cores, or leave the key out."),
        ("workers: [{name: a, url: h:1}]", 'workers[0].url is "h:1", but must begin with http://.'),
        ("workers: [{name: a, kv: h}]", 'workers[0].kv is "h", but must look like host:port.'),
        ("workers: [{name: a, kv: 'h:x'}]", 'workers[0].kv is "h:x", but must end with a port from 0 to 65535.'),
        ("workers: [{name: a, events: 'tcp://::1:5'}]", "must put an IPv6 address in brackets."),
        ("workers: [{name: P 0}]", "but must be lower-case letters, digits and hyphens, 63 at most."),
        ("workers: [{name: a}, {name: a}]", 'is "a", the name of workers[0]: give each worker its own name.'),
        ("workers: [{name: a, url: 'http://127.0.0.1:8000/'}]", "of router.port: give each listener its own."),
        ("router: {tenants: [{name: A, keys: [k]}]}", "digits and hyphens, and differ from others."),
        ("router: {tenants: [{name: default, keys: [k]}]}", "and differ from others."),
        ("router: {tenants: [{name: a, keys: []}]}", "must be at least one key, none of them empty or another's."),
        ("router: {tenants: [{name: a, keys: [k]}, {name: b, keys: [k]}]}", "none of them empty or another's."),
        ("router: {api_keys: [k], tenants: [{name: a, keys: [k]}]}", "none of them empty or another's."),
        ("links: [{from: a, to: b}]", 'links[0].from is "a", but no worker has that host: known are node-a.'),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_sentence(cluster_file: Path, text: str, sentence: str) -> None:
    message = refusal(cluster_file, text)
    assert message.startswith("cluster.yaml: ")
    assert message.endswith(sentence)


def test_of_several_mistakes_the_first_is_named(cluster_file: Path) -> None:
    assert "router.prot" in refusal(cluster_file, "router: {prot: 1}\nworkers: [{nam: x}]\nslo: 3")


def test_without_a_near_key_the_valid_ones_are_listed(cluster_file: Path) -> None:
    assert "valid are model, dtype, router," in refusal(cluster_file, "zzzz: 1")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model: a\nmodel: b", "cluster.yaml is not valid YAML: a key is written twice (line 1, column 1)."),
        ("router: [", "cluster.yaml is not valid YAML: expected the node content, but found '<stream end>'"),
        ("- 1", "cluster.yaml must hold a mapping of keys to values, such as `model: smollm2`."),
        ("router: &r {tls: *r}", "cluster.yaml is not valid YAML: found unconstructable recursive node"),
        ("workers: !!set {a, b}", "cluster.yaml is not valid YAML: could not determine a constructor for the tag"),
        ("workers: " + "[" * 3000 + "]" * 3000, "cluster.yaml is nested too deeply"),
        ("workers: [{<<: {name: a}, host: b, host: c}]", "cluster.yaml is not valid YAML: a key is written twice"),
    ],
)
def test_what_is_no_cluster_file(cluster_file: Path, text: str, sentence: str) -> None:
    assert refusal(cluster_file, text).startswith(sentence)


def test_a_merged_mapping_may_be_overridden(cluster_file: Path) -> None:
    cluster_file.write_text("workers:\n- &first {name: a, host: one, cores: [0]}\n- {<<: *first, name: b}\n")
    workers = load(cluster_file, environ={}).cluster.workers
    assert [(worker.name, worker.host, worker.cores) for worker in workers] == [("a", "one", [0]), ("b", "one", [0])]


def test_unreadable_files(cluster_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^none\.yaml does not exist: name the cluster file with --config\.$"):
        load(Path("none.yaml"), environ={})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path, environ={})
    cluster_file.write_bytes(b"model: \xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(cluster_file, environ={})


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("TOLLBRIDGE_ROUTER_PORT", "x", 'TOLLBRIDGE_ROUTER_PORT is "x", but must be a whole number from 0 to 65535.'),
        ("TOLLBRIDGE_ROUTER_PORT", "tcp://10.0.0.1:80", "(set enableServiceLinks: false in the pod)."),
        ("TOLLBRIDGE_ROUTER_PROT", "1", "sets no key: did you mean TOLLBRIDGE_ROUTER_PORT?"),
        ("TOLLBRIDGE_DTYPE", "int4", '"auto" or "float32" or "bfloat16" or "float16".'),
    ],
)
def test_a_wrong_variable_gets_one_sentence(name: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={name: text})
    assert name in caught.value.message
    assert caught.value.message.endswith(sentence)


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^--port: router.port is 70000, but"):
        load(environ={}, overrides=[Override(path="router.port", value=70000, flag="--port")])


def test_variables_that_are_not_ours_or_empty_are_left_alone() -> None:
    environ = {
        "TOLLBRIDGE_SECRET": "x" * 16,
        "TOLLBRIDGE_ROUTER_SERVICE_HOST": "10.0.0.1",
        "TOLLBRIDGE_ROUTER_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "TOLLBRIDGE_MODEL": "",
    }
    assert load(environ=environ).cluster == ClusterConfig()


def test_null_and_numbers_in_variables() -> None:
    environ = {"TOLLBRIDGE_CALIBRATION": "null", "TOLLBRIDGE_TRANSFER_STREAMS": "4", "TOLLBRIDGE_SLO_TTFT_S": "1.5"}
    cluster = load(environ=environ).cluster
    assert (cluster.calibration, cluster.transfer.streams, cluster.slo.ttft_s) == (None, 4, 1.5)


def test_every_scalar_has_a_variable_and_lists_have_none() -> None:
    assert variables()["TOLLBRIDGE_ENGINE_KV_CACHE_MIB"] == "engine.kv_cache_mib"
    assert not {"workers", "links", "router.api_keys", "router.tls", "router"} & set(variables().values())


def test_the_environment_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TOLLBRIDGE_MODEL", "elsewhere")
    assert load().cluster.model == "elsewhere"


@pytest.mark.parametrize("kind", ["static", "dns", "kubernetes"])
def test_a_discovery_may_be_a_word(cluster_file: Path, kind: str) -> None:
    workers = "workers: [{name: p, url: 'http://prefill:8000'}]"
    loaded = load_text(cluster_file, f"discovery: {kind}\n{workers}")
    assert loaded.cluster.discovery.kind == kind
    assert loaded.source("discovery.kind") == "cluster.yaml"
    assert load_text(cluster_file, f"discovery: {{kind: {kind}}}\n{workers}").cluster == loaded.cluster
    assert load(cluster_file, environ={"TOLLBRIDGE_DISCOVERY_KIND": "static"}).cluster.discovery.kind == "static"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("discovery: kubernets", 'discovery.kind is "kubernets", but must be "static" or "dns" or "kubernetes".'),
        ("discovery: {knd: dns}", "discovery.knd is no key of the cluster file: did you mean discovery.kind?"),
        ("discovery: {selector: a}", 'for kind "kubernetes" only, but discovery.kind is "static".'),
        ("discovery: {kind: kubernetes, file: a}", 'is for kind "static" only, but discovery.kind is "kubernetes".'),
        ("discovery: {kind: dns, min_ttl_s: 60}", "discovery.min_ttl_s is above discovery.max_ttl_s."),
        ("discovery: {kind: kubernetes, api: 'h:1'}", 'discovery.api is "h:1", but must begin with https://.'),
        ("discovery: {kind: kubernetes, api: 'http://10.0.0.1:80'}", "but beyond this machine the token needs https://."),
        ("discovery: {kind: kubernetes, engine: embedded, connector: nixl}", 'is "nixl", which only vLLM has.'),
        ("discovery: dns\nworkers: []", "workers is empty: list at least one worker."),
        ("discovery: dns\nworkers: [{name: p, url: 'http://prefill:0'}]", "name of SRV records: http://_http._tcp.NAME:0."),
        ("discovery: dns\nworkers: [{name: p, url: 'http://_http._tcp.p:80'}]", "http://_http._tcp.NAME:0."),
    ],
)  # fmt: skip
def test_a_mistake_in_the_discovery_gets_one_sentence(cluster_file: Path, text: str, sentence: str) -> None:
    assert refusal(cluster_file, text).endswith(sentence)


@pytest.mark.parametrize(
    ("worker", "host"),
    [
        ("url: http://10.0.0.5:8000", "10.0.0.5"),
        ("url: http://p-0.workers:8000/", "p-0.workers"),
        ('url: "http://[fd00::7]:8000"', "fd00::7"),
        ("url: http://127.0.0.3:8000", "localhost"),
        ("url: http://0.0.0.0:8000, kv: 0.0.0.0:7801", "localhost"),
        ("url: http://10.0.0.5:8000, host: node-7", "node-7"),
        ("url: http://127.0.0.1:8101, kv: 10.0.0.6:7801", "10.0.0.6"),  # through a tunnel
        ("url: http://10.0.0.5:8000, kv: 127.0.0.1:7801", "10.0.0.5"),
        ("url: http://10.0.0.5:8000, kv: 10.9.9.9:0", "10.0.0.5"),
        ("{}", "localhost"),
    ],
)
def test_a_worker_that_names_no_host_is_where_its_addresses_are(cluster_file: Path, worker: str, host: str) -> None:
    """Workers of one host share a link and a network card in the router's prices: two machines must not."""
    text = worker.replace("{}", "prefer: any")
    assert load_text(cluster_file, f"workers: [{{name: a, {text}}}]").cluster.workers[0].host == host


@pytest.mark.parametrize("discovery", ["kubernetes", "{file: workers.yaml}"])
def test_where_others_say_who_serves_hosts_of_links_and_workers_are_free(cluster_file: Path, discovery: str) -> None:
    text = f"discovery: {discovery}\nworkers: []\nlinks: [{{from: node-7, to: node-9, goodput_bytes_per_s: 1000000}}]"
    cluster = load_text(cluster_file, text).cluster
    assert (cluster.workers, cluster.lists_workers) == ([], False)
