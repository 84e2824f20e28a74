"""torchrun that ends as the job ended: python -m aligner.runtime.torchrun --standalone --nproc-per-node 2 train_ppo_actor.py ...

torchrun itself turns every exit code into 1 and prints its own traceback over the sentence that a rank has said."""

import logging
import sys

from aligner.runtime.exit_codes import ExitCode


def main(argv: list[str]) -> int:
    """Takes torchrun's own arguments. Returns the exit code of the rank that failed first, 1 where a signal killed it, 0 where none did."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for chatty in ("multiprocessing.api", "agent.server.api"):  # "failed (exitcode: 2) ... of binary"
        logging.getLogger(f"torch.distributed.elastic.{chatty}").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"error: rank {rank} was killed by signal {-failure.exitcode}", file=sys.stderr)
            return ExitCode.FAULT
        return failure.exitcode
    except SignalException as error:  # passed on to the ranks, which have ended by now
        return 128 + error.sigval
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
