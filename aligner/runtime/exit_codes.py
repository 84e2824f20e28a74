"""Exit codes of every entry script. Launchers read them: only REQUEUE asks to be started again as it was."""

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    """The run reached its last step, or the critic job was told to stop."""
    FAULT = 1
    """Something failed that no setting explains; the traceback is on the terminal or in the rank's log."""
    CONFIGURATION = 2
    """A setting, file or checkpoint was refused before anything was trained."""
    CONTRACT = 3
    """The two jobs do not fit together (tokenizer, vocabulary, lengths, run id, step), or the other job cannot be reached."""
    STORAGE = 4
    """The run folder cannot take what has to be written (disk full, quota). The last committed checkpoint is whole."""
    REQUEUE = 85
    """Stopped by SIGTERM or SIGUSR1 after a checkpoint was committed: start the same command again and it continues."""
    INTERRUPTED = 130
    """Stopped by SIGINT (Ctrl-C)."""
