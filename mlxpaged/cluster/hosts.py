"""The hostfile: which machine runs each rank, in the format of `mlx.launch`."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCAL = "127.0.0.1"
"""`mlx.launch` starts the ranks of this host itself, and all others with ssh."""

BACKENDS = ("ring", "jaccl", "jaccl-ring")


@dataclass(frozen=True)
class Host:
    """ssh: the name to log in to. ips: its addresses, on which the other ranks reach it."""

    ssh: str
    ips: tuple[str, ...]

    @property
    def is_local(self) -> bool:
        return self.ssh == LOCAL


@dataclass(frozen=True)
class Hosts:
    """hosts: in the order of their ranks; the first one is this machine. for_launch: the hostfile for `mlx.launch`."""

    backend: str
    hosts: tuple[Host, ...]
    for_launch: str

    @classmethod
    def read(cls, path: Path) -> Hosts:
        """Raises ValueError, with what is wrong, and OSError."""
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        backend, entries = "ring", found
        if isinstance(found, dict):
            backend, entries = found.get("backend") or "ring", found.get("hosts")
        if backend not in BACKENDS:
            raise ValueError(f"{path}: the backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if not isinstance(entries, list) or not entries:
            raise ValueError(f'{path} needs a list of hosts, such as [{{"ssh": "127.0.0.1", "ips": ["10.0.0.1"]}}]')
        hosts = tuple(host_of(path, rank, entry) for rank, entry in enumerate(entries))
        if not is_own(hosts[0].ips[0]):
            raise ValueError(
                f"{path}: the first host runs rank 0 beside the HTTP server, but {hosts[0].ips[0]} is no address of "
                "this machine"
            )
        entries[0]["ssh"] = LOCAL
        for entry, host in zip(entries, hosts, strict=True):
            entry["ips"] = list(host.ips)  # a rank may find another address for its own name
        return cls(backend, (Host(LOCAL, hosts[0].ips), *hosts[1:]), json.dumps(found))

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def addresses(self) -> frozenset[str]:
        """Addresses from which ranks may connect."""
        return frozenset(ip for host in self.hosts for ip in host.ips)

    def label(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank].ssh})"


def host_of(path: Path, rank: int, entry: Any) -> Host:
    """Raises ValueError."""
    fields = entry if isinstance(entry, dict) else {}
    ssh, ips = fields.get("ssh"), fields.get("ips")
    if not isinstance(ssh, str) or not ssh or ssh.startswith("-"):
        raise ValueError(f"{path}: host {rank} needs a name to log in to, as `ssh`")
    if not isinstance(ips, list) or not ips or not all(isinstance(ip, str) for ip in ips):
        raise ValueError(f"{path}: host {rank} ({ssh}) needs a list of its addresses, as `ips`")
    try:
        return Host(ssh, tuple(socket.gethostbyname(ip) for ip in ips))
    except OSError as error:
        raise ValueError(f"{path}: host {rank} ({ssh}): {error}") from None


def is_own(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
