"""Studies that can be run: the paper's benchmark, and effects from logs."""

from pathlib import Path


def write_records(directory: str | Path) -> None:
    """Write the CSV files of every study in a directory from the records of its finished jobs."""
    from cqm.experiments.studies.benchmark import write_scores
    from cqm.experiments.studies.logs import write_logs

    write_scores(Path(directory))
    write_logs(Path(directory))
