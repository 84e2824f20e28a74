"""A throw-away Slurm of four nodes on this machine: real daemons, one slurmd a node, each with a host name of its own. About a second."""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from tests.jobs.harness import environment

INSTALL = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "mungekey")
NODES, CPUS, GPUS, MEMORY = 4, 8, 8, 8000

# Requeued jobs start again after cred_expire; a machine that is busy needs some of it. GraceTime: what a preempted job gets to save.
# ReturnToService: a node that a test sets DOWN stays so, although its slurmd lives.
CONFIGURATION = """
ClusterName=aligner
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=15
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=1
SlurmctldTimeout=60
SlurmdTimeout=300
InactiveLimit=0
KillWait=15
MinJobAge=3600
UnkillableStepTimeout=60
MessageTimeout=60
BatchStartTimeout=60
SwitchType=switch/none
PropagateResourceLimits=NONE
RebootProgram=/bin/true
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MailProg=/bin/true
CompleteWait=0
GresTypes=gpu
"""
PARTITIONS = """
PartitionName=DEFAULT Nodes=node[1-{nodes}] MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Default=NO PriorityTier=10 PreemptMode=OFF GraceTime=0
"""


def missing() -> Optional[str]:
    """Why there can be no cluster on this machine, with what would change that; None where there can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if absent := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        return f"no {', '.join(absent)}: {INSTALL}"
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root (its daemons start jobs as the users that submit them)"
    if subprocess.run(["unshare", "-u", "-m", "true"], capture_output=True).returncode:
        return "this container may not make namespaces (unshare -u -m), in which each node has a host name of its own"
    return None


@dataclass
class Cluster:
    folder: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands, and for what they start."""
        own = {k: v for k, v in environment().items() if not k.startswith(("SLURM_", "SBATCH_"))}
        path = os.pathsep.join([own.get("PATH", ""), "/usr/sbin", "/sbin"])
        return {**own, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def run(self, *command: str, check: bool = True, **more: str) -> str:
        """A command's standard output. more: environment variables.

        squeue of Slurm 22.05 fails now and then, without a word, while parts of a heterogeneous job end: it is asked again."""
        everything = {**self.environment, **more}
        for left in reversed(range(5 if command[0] == "squeue" else 1)):
            done = subprocess.run(command, env=everything, capture_output=True, text=True, timeout=120)
            if done.returncode == 0 or not left:
                break
            time.sleep(0.5)
        assert not check or done.returncode == 0, (
            f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout

    def start(self) -> None:
        for name in ("run", "log", "state", "spool", "munge", "gpu"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        self._munge()
        self._configure()
        self.run("slurmctld", "-c", "-f", str(self.folder / "slurm.conf"))
        for node in self.nodes:
            self._slurmd(node)
        self._until_idle()

    @property
    def nodes(self) -> list[str]:
        return [f"node{i + 1}" for i in range(NODES)]

    def _munge(self) -> None:
        """With a key and a socket of its own, as root."""
        folder = self.folder
        (folder / "munge").chmod(0o700)
        self.run("mungekey", "--create", f"--keyfile={folder}/munge/key")
        files = (f"--pid-file={folder}/run/munged.pid", f"--log-file={folder}/log/munged.log")
        seed = f"--seed-file={folder}/munge/seed"
        self.run("munged", f"--key-file={folder}/munge/key", f"--socket={folder}/run/munge.sock", *files, seed)

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        text = CONFIGURATION.format(folder=self.folder, host=host, port=self.port)
        hosts = ["127.0.0.1 localhost", f"127.0.0.1 {host}"]
        for i, node in enumerate(self.nodes, start=1):
            hosts.append(f"127.0.1.{i} {node}")
            where = f"NodeName={node} NodeHostname={node} NodeAddr=127.0.1.{i} Port={self.port + i}"
            text += f"{where} CPUs={CPUS} RealMemory={MEMORY} Gres=gpu:{GPUS} State=UNKNOWN\n"
        (self.folder / "slurm.conf").write_text(text + PARTITIONS.format(nodes=NODES))
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        for i in range(GPUS):  # files that are there, so that --gpus-per-node works without hardware
            os.mknod(self.folder / "gpu" / f"nvidia{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        gres = f"NodeName=node[1-{NODES}] Name=gpu File={self.folder}/gpu/nvidia[0-{GPUS - 1}]\n"
        (self.folder / "gres.conf").write_text(gres)

    def _slurmd(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir()
        start = f"slurmd -N {node} -f '{self.folder}/slurm.conf'"
        own = f"hostname {node}; mount --bind '{self.folder}/hosts' /etc/hosts; exec {start}"
        self.run("unshare", "-u", "-m", "bash", "-c", own)

    def _until_idle(self, deadline: float = 60.0) -> None:
        until = time.monotonic() + deadline
        while (states := self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split()) != [
            "idle"
        ] * NODES:
            logs = "\n".join(file.read_text()[-2000:] for file in (self.folder / "log").iterdir())
            assert time.monotonic() < until, f"the nodes are {states}\n{logs}"
            time.sleep(0.1)

    def states(self) -> dict[int, str]:
        """Of every job that Slurm remembers, by id; of a heterogeneous one its parts have ids of their own."""
        lines = self.run("squeue", "-h", "-t", "all", "-o", "%A %T").splitlines()
        return {int(number): state for number, state in (line.split() for line in lines)}

    def job(self, number: int) -> dict[str, str]:
        """What Slurm says of a job (scontrol show job)."""
        words = self.run("scontrol", "show", "job", "-o", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def empty(self) -> None:
        """Cancel every job, and bring every node back."""
        self.run("scancel", "-u", "root", check=False)
        self.run("scontrol", "update", f"NodeName=node[1-{NODES}]", "State=RESUME", check=False)
        until = time.monotonic() + 180
        while self.run("squeue", "-h"):
            assert time.monotonic() < until, self.run("squeue")
            time.sleep(0.2)

    def stop(self) -> None:
        """End every job, then every daemon that was started here, and no other."""
        with contextlib.suppress(Exception):
            self.empty()
        files = [*(self.folder / "run").glob("slurm*.pid"), self.folder / "run" / "munged.pid"]
        ended = [int(file.read_text()) for file in files if file.exists() and file.read_text().strip()]
        ended = [pid for pid in ended if str(self.folder) in command_of(pid)]
        for pid in ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + 15
        while [pid for pid in ended if command_of(pid)] and time.monotonic() < until:
            time.sleep(0.1)
        for pid in ended:
            if str(self.folder) in command_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free now."""
    for base in range(21000 + os.getpid() % 97 * 100, 32000, count):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for i in range(count):
                probe = probes.enter_context(socket.socket())
                probe.bind(("127.0.0.1", base + i))
            return base
    raise OSError("no free ports")
