"""`make report`: summary, plots and result of a run, written anew from the files in its folder.

Every end of a run writes them in this way: after the last step, after a signal, after a failure,
and when `make stop` ends what a killed controller left.
"""

from __future__ import annotations

from configs.load import read_config
from controller.metrics.records import read_metrics
from controller.report.plots import write_plots
from controller.report.state import counters_of, totals_of
from controller.report.summary import RunResult, result_line, summarize, write_summary
from controller.report.timeline import write_last_timeline
from controller.run_dir import RunDir, RunRecord

CONTROLLER_GONE = "its controller is gone; `make stop` ends what is left"


def write_report(run_dir: RunDir) -> RunResult:
    """`summary.md`, `result.json` and the plots, of what the run has recorded so far.

    Raises ValueError if its settings or its records cannot be read.
    """
    config = read_config(run_dir.path / "config.yaml")
    records = read_metrics(run_dir.metrics)
    record = run_dir.read_record()
    state, error = _state_of(record)
    until = records[-1].t if records else record.ended or record.started
    last = next((r for r in reversed(records) if r.kind == "buffer"), None)
    result = summarize(
        run=run_dir.name,
        config=config,
        records=records,
        stats=totals_of(last, config.buffer.max_staleness),
        counters=counters_of(last) if last is not None else {},
        wall_s=until - record.started,
        state=state,
        error=error,
    )
    write_plots(run_dir.path, records)
    write_last_timeline(run_dir.path, records)
    write_summary(run_dir.path, result, config)
    return result


def print_report(run_dir: RunDir) -> None:
    """The same from the command line; the last line is the result."""
    result = write_report(run_dir)
    print(f"{run_dir.name} ({result.state}): wrote {run_dir.path / 'summary.md'}")
    print(result_line(result))


def _state_of(record: RunRecord) -> tuple[str, str | None]:
    if record.state == "running" and not record.is_alive:
        return "failed", CONTROLLER_GONE
    return record.state, record.error
