"""torchrun's arguments and the variables its workers see, each with a meaning in one line.

The meanings are written here; the arguments themselves are read from the torchrun that is installed, and a test holds
both lists against each other. So a table in a chapter shows what this machine's torchrun really takes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """One argument: its spellings, its default ("" if none), our meaning, torchrun's own help text."""

    flags: tuple[str, ...]
    default: str
    meaning: str
    help: str

    @property
    def name(self) -> str:
        return self.flags[0]


MEANINGS = {
    "--nnodes": "how many machines: a number, or MIN:MAX for a job that may shrink and grow",
    "--nproc-per-node": "workers on this machine: a number, or gpu, cpu, auto to count what is there",
    "--rdzv-backend": "how agents find each other: static (ranks given by you), c10d (a store in one of them), etcd",
    "--rdzv-endpoint": "host:port where they meet; for c10d the machine that holds the store",
    "--rdzv-id": "the job's name; agents with the same name and meeting place belong together",
    "--rdzv-conf": "time limits and more of the rendezvous, as key=value,key=value",
    "--standalone": "one machine only: meet on a free port of this machine, nothing else to say",
    "--max-restarts": "how often all workers are started again after one of them failed",
    "--monitor-interval": "seconds between an agent's looks at its workers",
    "--start-method": "how workers are made when they are functions; a script is always a new process",
    "--event-log-handler": "where an agent reports what happens to its workers: null, or console",
    "--role": "a name for this kind of worker; ROLE_RANK and ROLE_WORLD_SIZE count within it",
    "--module": "the script is a module's name, run as with python -m",
    "--no-python": "the script is any program, not Python",
    "--run-path": "run the script inside a function of the agent's choosing (runpy) instead of a new python",
    "--log-dir": "where log and error files go: a directory for each restart and each worker",
    "--redirects": "which streams go into files instead of the terminal: 1 stdout, 2 stderr, 3 both",
    "--tee": "which streams go into files and to the terminal as well",
    "--log-line-prefix-template": "what stands before each line of --tee, such as '[rank ${rank}] '",
    "--local-ranks-filter": "show only these local ranks on the terminal",
    "--duplicate-stdout-filters": "copy stdout lines that contain one of these words into one more file",
    "--duplicate-stderr-filters": "the same for stderr",
    "--node-rank": "static only: the number of this machine, 0 for the one that the others connect to",
    "--master-addr": "static only: the address of machine 0",
    "--master-port": "static only: the port on machine 0",
    "--local-addr": "this machine's own address, where its host name would lead others astray",
    "--logs-specs": "a plug-in that decides where logs go",
    "--numa-binding": "keep each worker on the processors near its GPU",
    "--signals-to-handle": "signals that an agent hands on to its workers before it ends",
    "--shutdown-timeout": "seconds that workers get to end by themselves before they are killed",
    "--virtual-local-rank": "each worker sees one GPU only, as device 0, and has LOCAL_RANK 0",
    "--print-completion": "print a script with which a shell completes torchrun's arguments",
    "training_script": "the script (or module, or program) that every worker runs",
    "training_script_args": "everything after it: the script's own arguments",
}
"""By first spelling. What an older or newer torchrun lacks is left out of `installed_options`."""


@dataclass(frozen=True)
class Variable:
    """An environment variable of a worker; `always`: set for every worker of every job."""

    name: str
    meaning: str
    always: bool = True


VARIABLES = (
    Variable("LOCAL_RANK", "this worker's number on its machine: which GPU is its own"),
    Variable("RANK", "its number in the whole job"),
    Variable("GROUP_RANK", "the number of its machine (of its agent)"),
    Variable("ROLE_RANK", "its number among workers of the same role"),
    Variable("ROLE_NAME", "the role, from --role"),
    Variable("LOCAL_WORLD_SIZE", "workers on its machine"),
    Variable("WORLD_SIZE", "workers in the whole job"),
    Variable("GROUP_WORLD_SIZE", "machines in the job"),
    Variable("ROLE_WORLD_SIZE", "workers with the same role"),
    Variable("MASTER_ADDR", "the machine whose store init_process_group connects to"),
    Variable("MASTER_PORT", "the port of that store"),
    Variable(
        "TORCHELASTIC_RESTART_COUNT", "restarts after a failure so far; a change of nodes does not count"
    ),
    Variable("TORCHELASTIC_MAX_RESTARTS", "how many there may be, from --max-restarts"),
    Variable("TORCHELASTIC_RUN_ID", "the job's name, from --rdzv-id"),
    Variable("TORCHELASTIC_USE_AGENT_STORE", "True: the agent holds the store, no worker needs to open one"),
    Variable("TORCHELASTIC_ERROR_FILE", "where @record writes the exception that ends this worker"),
    Variable("TORCHELASTIC_SIGNALS_TO_HANDLE", "signals that the agent hands on, from --signals-to-handle"),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1: a failed or stuck NCCL operation ends the worker"),
    Variable(
        "OMP_NUM_THREADS", "processor threads of each worker; 1 for several workers, unless you set it", False
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES", "handed on if set; with --virtual-local-rank the worker's own GPU", False
    ),
    Variable("PYTHON_EXEC", "set it yourself: the Python that runs the workers", False),
)


def installed_options() -> list[Option]:
    """The arguments of the installed torchrun, in its own order. Raises KeyError for one that has no meaning here."""
    from torch.distributed.run import get_args_parser

    options = []
    for action in get_args_parser()._actions:
        if action.dest == "help":
            continue
        flags = tuple(
            sorted(action.option_strings, key=lambda flag: (not flag.startswith("--"), "_" in flag))
        )
        flags = flags or (action.dest,)
        plain = action.default is None or action.default is False or action.default == []
        default = "" if plain or not action.option_strings else str(action.default)
        options.append(Option(flags, default, MEANINGS[flags[0]], " ".join((action.help or "").split())))
    return options


def worker_variables() -> list[Variable]:
    """The environment variables that tell a worker who it is."""
    return list(VARIABLES)
