"""Certificates made on the spot."""

from __future__ import annotations

from pathlib import Path

import trustme

from tollbridge.transfer.channel import TlsFiles


def make_tls(folder: Path, name: str, ca: trustme.CA, *, trusts: trustme.CA | None = None) -> TlsFiles:
    """Write a worker's certificate under `ca`, its key, and the CA that it trusts (`ca` itself by default)."""
    leaf = ca.issue_cert(f"{name}.tollbridge.invalid")
    files = TlsFiles(
        cert=str(folder / f"{name}.pem"), key=str(folder / f"{name}.key"), ca=str(folder / f"{name}-ca.pem")
    )
    leaf.cert_chain_pems[0].write_to_path(files.cert)
    leaf.private_key_pem.write_to_path(files.key)
    (trusts or ca).cert_pem.write_to_path(files.ca)
    return files
