"""torchrun that ends as the job ended: python -m aligner.runtime.torchrun --standalone --nproc-per-node 2 train_ppo_actor.py ...

torchrun itself turns every exit code into 1 and prints its own traceback over the sentence that a rank has said."""

import logging
import signal
import sys
from typing import Any

from aligner.runtime.exit_codes import ExitCode


def first_failure(failures: dict) -> tuple[int, Any]:
    """The rank that was killed, where one was: the others end of that. Else the one that failed first."""
    killed = {rank: failure for rank, failure in failures.items() if failure.exitcode < 0}
    # SIGTERM is torchrun's own.
    killed = {rank: failure for rank, failure in killed.items() if failure.exitcode != -signal.SIGTERM}
    return min((killed or failures).items(), key=lambda item: item[1].timestamp)


def main(argv: list[str]) -> int:
    """Takes torchrun's own arguments. Returns the exit code of the rank that failed first, 1 where a signal killed it, 0 where none did."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for chatty in ("elastic.multiprocessing.api", "elastic.agent.server.api"):  # "failed (exitcode: 2) ... of binary"
        logging.getLogger(f"torch.distributed.{chatty}").setLevel(logging.CRITICAL)
    # "Setting OMP_NUM_THREADS ... to be 1": parallel.threads decides
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    try:
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"error: rank {rank} was killed by {name}: by hand, or for memory (dmesg)", file=sys.stderr)
            return ExitCode.FAULT
        return failure.exitcode
    except SignalException as error:  # passed on to the ranks, which have ended by now
        return 128 + error.sigval
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
