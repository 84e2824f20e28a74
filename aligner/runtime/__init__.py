"""What a run leaves and shows: folder, metrics, log, timers, report, signals."""
