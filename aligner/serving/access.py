"""Who may speak to the server: where it binds, and the token that it asks for where others could reach it."""

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Any, Mapping, Optional

import psutil

GATE_HEADER = "triton-access-token"  # Triton compares it before it reads the body
TOKEN_HEADER = "aligner-token"  # compared in our process


def is_loopback(address: str) -> bool:
    return address == "localhost" or ipaddress.ip_address(address).is_loopback


def resolve_bind(bind: str, environ: Mapping[str, str]) -> str:
    """The address of serving.bind. auto: loopback, or in a Slurm step this node's own address. Raises ValueError."""
    if bind == "auto":
        return node_address() if "SLURM_STEP_ID" in environ else "127.0.0.1"
    for address in psutil.net_if_addrs().get(bind, []):  # a network interface
        if address.family == socket.AF_INET:
            return address.address
    try:
        address = socket.gethostbyname(bind)
        with socket.socket() as probe:
            probe.bind((address, 0))
        return address
    except OSError as error:
        raise ValueError(
            f"serving.bind={bind} is no address of this host ({error}); use auto, an IPv4 address or a network interface"
        ) from None


def node_address() -> str:
    """The address by which other nodes know this one. Raises ValueError where only loopback is known."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    if is_loopback(address):  # Debian maps the host's name to 127.0.1.1: ask the routing table, which sends nothing
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))
                address = probe.getsockname()[0]
            except OSError:
                pass
    if is_loopback(address):
        raise ValueError(
            f"the host name {socket.gethostname()} resolves to loopback only; set serving.bind to this node's address"
        )
    return address


def read_token(file: Path) -> str:
    """The token in a file that its owner alone can read. Raises ValueError."""
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        token = file.read_text().strip()
    except OSError as error:
        raise ValueError(f"token file {file} cannot be read: {error.strerror}") from None
    if mode & 0o077:
        raise ValueError(f"token file {file} has mode {mode:04o}, readable by others; chmod 600 it")
    if len(token) < 16:
        raise ValueError(f"token file {file} holds {len(token)} characters; a token needs at least 16")
    return token


def make_token(file: Path) -> str:
    """The token in `file`, made first where there is none (mode 0600 from its first byte on)."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(secrets.token_urlsafe(32) + "\n")
        os.replace(partial, file)
    return read_token(file)


def gate_of(token: str) -> str:
    """What Triton compares. Not the token itself: Triton takes it on its command line, which others on the node can read."""
    return hashlib.sha256(b"aligner gate:" + token.encode()).hexdigest()


def headers(token: Optional[str]) -> dict[str, str]:
    """The headers that a client sends."""
    return {} if token is None else {GATE_HEADER: gate_of(token), TOKEN_HEADER: token}


def allowed(token: Optional[str], parameters: Optional[Mapping[str, Any]]) -> bool:
    """Whether a request, with its forwarded headers as parameters, carries the token that is asked for."""
    if token is None:
        return True
    given = str((parameters or {}).get(TOKEN_HEADER, ""))
    return hmac.compare_digest(given.encode(), token.encode())
