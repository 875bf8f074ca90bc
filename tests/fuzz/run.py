"""Coverage-guided fuzzing of what reads a peer's bytes: `python tests/fuzz/run.py --minutes 30`.

It needs atheris (the extra `fuzz`). The targets share the time, or one takes it all (`--target`). Inputs that reach
new code are merged into tests/fuzz/corpus, which pytest replays without atheris. Exit code 1 when a target failed; its
input is left in the folder that is named.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
MAX_INPUT_BYTES = 1024
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the frame parser, the handshake and the messages.")
    parser.add_argument("--minutes", type=float, default=30.0, help="in all")
    parser.add_argument("--target", help="only this one")
    parser.add_argument("--libfuzzer", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # a child: fuzz here
    options = parser.parse_args()
    if options.libfuzzer is not None:
        _fuzz(options.target, options.libfuzzer)
    from tests.fuzz.targets import TARGETS

    names = [options.target] if options.target else sorted(TARGETS)
    failed = [name for name in names if not _run(name, 60 * options.minutes / len(names))]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run(name: str, seconds: float) -> bool:
    """Fuzz one target in a process of its own, then keep the inputs that matter; return whether it survived."""
    from tests.fuzz.seeds import seeds

    kept = CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    found = work / "found"
    found.mkdir()
    for number, seed in enumerate(seeds(name)):
        (found / f"seed-{number}").write_bytes(seed)
    flags = [f"-max_total_time={int(seconds)}", f"-max_len={MAX_INPUT_BYTES}", "-print_final_stats=1", "-timeout=120"]
    done = _child(name, [str(found), str(kept), f"-artifact_prefix={work}/", *flags])
    runs = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    coverage = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)
    print(
        f"{name:<10} {int(runs[1]) if runs else 0:>10,} executions in {seconds:.0f} s, "
        f"edges and features {'/'.join(coverage[-1]) if coverage else '-'}, exit {done.returncode}",
        flush=True,
    )
    if done.returncode != 0:
        print(done.stderr[-4000:], f"\nsee {work}")
        return False
    merged = work / "merged"
    merged.mkdir()
    done = _child(name, ["-merge=1", f"-max_len={MAX_INPUT_BYTES}", str(merged), str(kept), str(found)])
    if done.returncode != 0 or not any(merged.iterdir()):
        print(f"the inputs could not be merged: {done.stderr[-2000:]}")
        return False
    for path in kept.iterdir():
        path.unlink()
    for path in merged.iterdir():
        shutil.copy(path, kept / hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest())
    return True


def _child(name: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, "--target", name, "--libfuzzer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _fuzz(name: str, arguments: list[str]) -> None:
    """Hand over to libFuzzer, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=["tollbridge.transfer", "tollbridge.wire"]):
        from tests.fuzz.targets import TARGETS
    again = shlex.join([sys.executable, __file__, "--target", name, "--libfuzzer"])  # a merge runs it in a shell
    atheris.Setup([again, *arguments], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
