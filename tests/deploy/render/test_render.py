"""The articles' clusters as objects of every target: judged strictly, and what a person would look for in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tollbridge.config.cluster import ClusterConfig, TransferConfig
from tollbridge.config.load import load
from tollbridge.deploy.lint.judge import judge
from tollbridge.deploy.manifest import base, to_yaml
from tollbridge.deploy.render.everything import Rendered, render
from tollbridge.deploy.render.site import Target
from tollbridge.errors import ConfigError

ROOT = Path(__file__).parents[3]
CLUSTERS = ("1p1d", "2p2d", "2p1d")
TARGETS: tuple[Target, ...] = ("disaggregatedset", "dgd", "deployments")
SECRET = "a-secret-of-32-characters-or-more"


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def cluster(which: str, **deploy: Any) -> ClusterConfig:
    """Return a cluster file of deploy/clusters, with other values in its section `deploy`."""
    loaded = load(ROOT / "deploy" / "clusters" / f"{which}.yaml").cluster
    tree: dict[str, Any] = msgspec.to_builtins(loaded)
    for key, value in deploy.items():
        section = tree["deploy"]
        section[key] = {**section[key], **value} if isinstance(section[key], dict) else value
    return msgspec.convert(tree, ClusterConfig)


def made(which: str = "1p1d", target: Target = "disaggregatedset", **deploy: Any) -> Rendered:
    return render(cluster(which, **deploy), target, SECRET)


def one(rendered: Rendered, kind: str, name: str | None = None) -> dict[str, Any]:
    return next(o for o in rendered.objects if o["kind"] == kind and name in (None, o["metadata"]["name"]))


def roles(rendered: Rendered) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = one(rendered, "DisaggregatedSet")["spec"]["roles"]
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CLUSTERS)
def test_nothing_is_found_in_what_is_rendered(name: str, target: Target) -> None:
    assert judge({"all.yaml": to_yaml(made(name, target).objects)}) == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "deploy",
    [
        {"monitoring": True, "hf_token_secret": "hf", "priority_class": "high", "revision": "a09a354"},
        {
            "spare_gpus": True,
            "install": "image",
            "images": {"worker": "example.org/vllm:v0.25.1", "pull_secrets": ["registry"]},
        },
        {"gpu": {"mechanism": "resource", "runtime_class": "nvidia"}, "network_policy": False},
        {"prefill": {"tensor_parallel": 4}, "decode": {"tensor_parallel": 4}},
        {"decode": {"autoscale": {"max": 4}}, "cache": {"kind": "download", "size": "40Gi"}},
        {"decode": {"args": ["--enforce-eager"], "env": {"NCCL_DEBUG": "WARN"}}},
    ],
    ids=lambda deploy: "-".join(deploy),
)
def test_every_option_renders_what_is_sound(deploy: dict[str, Any], target: Target) -> None:
    assert judge({"all.yaml": to_yaml(made("1p1d", target, **deploy).objects)}) == []


@pytest.mark.parametrize("target", TARGETS)
def test_embedded_workers_deploy_too(target: Target) -> None:
    given = msgspec.structs.replace(
        cluster("1p1d", engine="embedded", gpu={"mechanism": "none"}, images={"worker": "tollbridge/embedded:0.1.0"}),
        model="smollm2",
    )
    rendered = render(given, target, SECRET)
    assert judge({"all.yaml": to_yaml(rendered.objects)}) == []
    assert "nvidia.com/gpu" not in to_yaml(rendered.objects)


def test_the_same_file_renders_the_same_and_both_roles_have_one_revision() -> None:
    first, second = made(), made()
    assert to_yaml(first.objects) == to_yaml(second.objects)
    labels = [role["spec"]["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"] for role in roles(first)]
    assert len({each["tollbridge.io/revision"] for each in labels}) == 1


def test_a_change_of_one_role_changes_the_revision_of_both_and_a_change_of_replicas_does_not() -> None:
    def revision(**deploy: Any) -> str:
        text: str = to_yaml(made("2p2d", "deployments", **deploy).objects).partition("tollbridge.io/revision: ")[2]
        return text[:8]

    assert revision() == revision(prefill={"replicas": 3})
    assert revision() != revision(prefill={"args": ["--enforce-eager"]})


def test_a_rollout_that_takes_everything_down_says_so() -> None:
    assert any("OUTAGE" in note for note in made("1p1d").notes)
    assert not any("OUTAGE" in note for note in made("2p2d").notes)
    assert not any("OUTAGE" in note for note in made("1p1d", spare_gpus=True).notes)
    rolling = [role["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] for role in roles(made("1p1d"))]
    assert rolling == [{"maxSurge": 0, "maxUnavailable": 1}] * 2


def test_the_memory_limit_is_the_planners_with_its_terms() -> None:
    rendered = made("1p1d", memory={"process": "6 GiB", "shm": "1 GiB"})
    template = roles(rendered)[0]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert template["spec"]["containers"][0]["resources"]["limits"]["memory"] == "8832Mi"  # (6144 + 1024 + 512) x 1.15
    assert (
        "9.26 GB = (process as given 6.44 GB + shared memory 1.07 GB + both rings 537 MB) x 1.15" in rendered.notes[0]
    )


def test_nixl_is_given_memory_for_every_request_it_stages() -> None:
    few = made("2p1d", memory={"concurrency": 1}).notes[0]
    many = made("2p1d", memory={"concurrency": 64}).notes[0]
    assert "1 requests staged of 470 MB" in few
    assert "64 requests staged of 470 MB 30.1 GB" in many


def test_a_lower_limit_is_refused_with_the_arithmetic_unless_forced() -> None:
    given = cluster("1p1d", prefill={"memory_limit": "3584Mi"})
    with pytest.raises(
        ConfigError, match=r"prefill\.memory_limit is 3584Mi .* needs 15\.4 GB = \(process .*\) x 1\.15"
    ):
        render(given, "disaggregatedset", SECRET)
    forced = render(given, "disaggregatedset", SECRET, force=True)
    assert "3584Mi as given; the planner's is 15.4 GB" in forced.notes[0]


@pytest.mark.parametrize(
    ("deploy", "sentence"),
    [
        ({"name": "x" * 33}, "32 at most"),
        ({"name": "1p1d"}, "deploy.name"),
        ({"decode": {"tensor_parallel": 2}}, "every rank sends to its like"),
        ({"connector": "nixl", "prefill": {"tensor_parallel": 2}}, "prefill may have at most as many"),
        ({"prefill": {"replicas": 2, "node_selector": {"pool": "a"}}}, "ReadWriteOnce"),
        ({"prefill": {"args": ["--tensor-parallel-size=2"]}}, "a key of its own"),
        ({"install": "image"}, "without the connector"),
        ({"engine": "embedded"}, "computes on the CPU"),
        ({"gpu": {"mechanism": "none"}}, "not a vLLM for CPUs"),
        ({"decode": {"memory_limit": "16GB"}}, "a quantity such as 16Gi"),
        ({"decode": {"cpu": "many"}}, "deploy.decode.cpu"),
        (
            {"decode": {"autoscale": {"min": 3, "max": 2}, "node_selector": {"kubernetes.io/hostname": "b"}}},
            "below its min",
        ),
    ],
)
def test_what_cannot_be_deployed_is_refused_in_a_sentence(deploy: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        made("1p1d", **deploy)


def test_api_keys_are_in_a_secret_and_the_secret_is_in_one_object_only() -> None:
    given = cluster("1p1d")
    router = msgspec.structs.replace(given.router, api_keys=["a-key-for-clients"])
    rendered = render(msgspec.structs.replace(given, router=router), "disaggregatedset", SECRET)
    assert [o["kind"] for o in rendered.objects if "a-key-for-clients" in str(o)] == ["Secret"]
    assert [o["kind"] for o in rendered.objects if SECRET in str(o)] == ["Secret"]


def test_a_base_lists_its_files() -> None:
    files = base(made().files)
    listed = [line.removeprefix("- ") for line in files["kustomization.yaml"].splitlines() if line.startswith("- ")]
    assert set(listed) == files.keys() - {"kustomization.yaml"}


def test_workers_run_with_little_rights_and_no_token() -> None:
    for role in roles(made()):
        spec = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert all(c["securityContext"]["capabilities"] == {"drop": ["ALL"]} for c in spec["containers"])
    router = one(made(), "Deployment", "pd-router")["spec"]["template"]["spec"]["containers"][0]
    assert router["securityContext"]["readOnlyRootFilesystem"] is True
    assert one(made(), "Role")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]


def test_a_worker_has_time_to_leave() -> None:
    spec = roles(made())[0]["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > 5 + 60 + 60
    assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][:3] == [
        "python3",
        "-m",
        "tollbridge.deploy.drain",
    ]


def test_the_section_transfer_reaches_the_pods() -> None:
    transfer = TransferConfig(bandwidth_cap=1_000_000)
    rendered = render(msgspec.structs.replace(cluster("1p1d"), transfer=transfer), "deployments", SECRET)
    assert to_yaml(rendered.objects).count('"bandwidth_cap_bytes_per_s": 1000000') == 2
