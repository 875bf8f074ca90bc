"""`tollbridge deploy`: write Kubernetes objects from the cluster file, and judge objects of anybody."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

from cyclopts import App, Parameter

from tollbridge.cli.options import ConfigFile, configure
from tollbridge.errors import ConfigError

if TYPE_CHECKING:
    from tollbridge.deploy.lint.findings import Finding

app = App(name="deploy", help_format="plaintext")
SECRET_FILE = "secret.yaml"  # noqa: S105 (the name of a file)
SECRET_BYTES = 32


@app.command(
    help="Write the objects of a deployment.\n\n"
    "As one stream of YAML, or with --out as a Kustomize base. What they rest on (the terms of the memory limits, "
    "what a rollout costs) goes to stderr. The cluster secret is taken from TOLLBRIDGE_SECRET, else from the "
    "secret.yaml that is there already, else made. Exit code 1 when `deploy validate` would find something in it, as "
    "your own args may bring about.\n\n"
    "--to local-check shows the rendered command lines as processes of this machine; with --run it starts them, on "
    "vLLM for CPUs, and ends with 0 once a split is verified."
)
def render(
    *,
    to: Annotated[
        Literal["disaggregatedset", "dgd", "deployments", "local-check"], Parameter(help="The kind of objects.")
    ],
    config: ConfigFile = None,
    out: Annotated[Path | None, Parameter(help="A folder for a Kustomize base; by default all goes to stdout.")] = None,
    force: Annotated[bool, Parameter(negative=(), help="Keep a memory limit below the planner's.")] = False,
    run: Annotated[bool, Parameter(negative=(), help="local-check: start the processes, verify a split.")] = False,
    python: Annotated[str, Parameter(help="local-check: the interpreter that has vLLM.")] = "python3",
) -> int:
    """Write the objects of a deployment."""
    cluster = configure(config).cluster
    if to == "local-check":
        from tollbridge.cli.local_check import local_check

        return local_check(cluster, _secret(cluster.secret.env, out), run=run, python=python)
    if run:
        raise ConfigError("--run goes with --to local-check: objects are applied by kubectl.")
    from tollbridge.deploy.lint.judge import judge
    from tollbridge.deploy.manifest import base, to_yaml
    from tollbridge.deploy.render.everything import render as render_objects

    made = render_objects(cluster, to, _secret(cluster.secret.env, out), force=force)
    print("\n".join(made.notes), file=sys.stderr)
    files = base(made.files)
    if out is None:
        print(to_yaml(made.objects), end="")
    else:
        _write(out, files)
        print(f"{out}: {len(made.objects)} objects. Next: kubectl apply --server-side -k {out}", file=sys.stderr)
    return _tell([each for each in judge(files) if not (force and each.rule == "memory")], sys.stderr)


@app.command(
    help="Say what is wrong with manifests, ours or anybody's.\n\n"
    "Strict schemas of Kubernetes 1.37, LWS 0.10, Dynamo and the Prometheus operator, their CEL and webhook rules, "
    "and what they let pass: splits that never happen, rollouts that stall, workers that are killed. All files "
    "are judged together. One finding each: where, what, why, the mend. Exit code 1 when there are any."
)
def validate(
    *files: Annotated[Path, Parameter(allow_leading_hyphen=True, help="Files or folders; - reads stdin.")],
    json: Annotated[bool, Parameter(negative=(), help="Print one JSON document.")] = False,
) -> int:
    """Say what is wrong with manifests."""
    import msgspec

    from tollbridge.deploy.lint import cel
    from tollbridge.deploy.lint.judge import judge, unchecked
    from tollbridge.deploy.lint.reading import files_of

    if not files:
        raise ConfigError("which manifests? Name files or folders.")
    texts = {str(path): _read(path) for path in files_of(list(files))}
    evaluate = cel.evaluator()
    findings = judge(texts, evaluate)
    if json:
        print(msgspec.json.encode({"files": list(texts), "findings": findings}).decode())
        return 1 if findings else 0
    _tell(findings, sys.stdout)
    print(
        f"{len(texts)} file{'s' * (len(texts) != 1)}, {len(findings)} finding{'s' * (len(findings) != 1)}",
        file=sys.stderr,
    )
    others = unchecked(texts)
    if others:
        print(f"not judged, their kinds are not known here: {', '.join(others)}", file=sys.stderr)
    if evaluate is cel.unknown:
        print("CEL rules were not evaluated: pip install 'tollbridge[deploy]'.", file=sys.stderr)
    return 1 if findings else 0


def _tell(findings: list[Finding], stream: TextIO) -> int:
    """Write the findings; return the exit code."""
    for each in findings:
        where = f"{each.file}: {each.object}: {each.path}"
        print(f"{where}\n  {each.what}\n  why:  {each.why}\n  mend: {each.mend}", file=stream)
    return 1 if findings else 0


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}.") from None


def _secret(variable: str | None, out: Path | None) -> str:
    """Return the cluster secret; a folder that has one keeps it, or pods of two revisions would refuse each other."""
    import secrets

    import yaml

    given = os.environ.get(variable) if variable else None
    if given:
        return given
    path = out / SECRET_FILE if out else None
    if path is not None and path.exists():
        try:
            found = yaml.safe_load(_read(path))
        except yaml.YAMLError:
            found = None
        if isinstance(found, dict) and isinstance(found.get("stringData"), dict):
            return str(next(iter(found["stringData"].values())))
        raise ConfigError(f"{path} holds no Secret of ours: take it away, or set {variable}.")
    print("secret: a new one was made; set TOLLBRIDGE_SECRET, or keep the file, to keep it.", file=sys.stderr)
    return secrets.token_hex(SECRET_BYTES)


def _write(out: Path, files: dict[str, str]) -> None:
    """Write the files, that of the secret for this user only; ConfigError where the folder cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            mode = 0o600 if name == SECRET_FILE else 0o644
            descriptor = os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from None
