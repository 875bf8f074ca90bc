"""Arms as they are written on the command line."""

from __future__ import annotations

import pytest

from tollbridge.bench.arms import parse_arm
from tollbridge.cli.main import run
from tollbridge.errors import ConfigError


def test_a_server_is_its_own_worker() -> None:
    arm = parse_arm("a=http://h:8000/v1")
    assert (arm.name, arm.url, arm.workers, arm.num_workers) == ("a", "http://h:8000", ["http://h:8000"], 1)


def test_a_policy_behind_a_router_names_its_workers() -> None:
    arm = parse_arm("b=http://r:1,policy=split,workers=http://p:1+http://d:2/,model=m,key=KEY,title=split it")
    assert (arm.policy, arm.workers, arm.num_workers) == ("split", ["http://p:1", "http://d:2"], 2)
    assert (arm.model, arm.api_key_env, arm.label) == ("m", "KEY", "split it")
    assert parse_arm("b=http://r:1,policy=split,gpus=4").num_workers == 4


@pytest.mark.parametrize(
    "text", ["a", "=http://h", "a=h:80", "a=http://h,polcy=x", "a=http://h,gpus=0", "a=http://h,key="]
)
def test_what_is_no_arm_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_arm(text)


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "interference", "--arm", "a=nowhere"]) == 2
    assert "is not the URL of a server" in capsys.readouterr().err
    assert run(["bench", "interference", "--streems", "3"]) == 2
