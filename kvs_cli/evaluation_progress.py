"""What an evaluation says while it runs: how far it is, on standard error, and its results chunk by chunk.

How results look is evaluation_render.py's subject.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic

from kvs_cli.console import Console, is_terminal
from kvs_core.evaluate.chunk_run import Progress

LINE_SECONDS = 30.0
"""Between two lines where the current line cannot be rewritten."""

REWRITE_SECONDS = 0.2


class ProgressReporter:
    """Called by the core after every tile of rows; shows a line now and then, and results as chunks end.

    describe       turns the finished chunks' rows into a few words, such as the perplexity so far
    render_chunks  turns them into the text of the chunks from an index on, for standard output; under ``--json``
                   nothing goes there before the end
    """

    def __init__(
        self,
        console: Console,
        describe: Callable[[Progress], str],
        render_chunks: Callable[[Progress, int], str],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._console = console
        self._describe = describe
        self._render_chunks = render_chunks
        self._n_rendered = 0
        self._clock = clock
        self._started = clock()
        self._shown = self._started
        self.latest: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        if self.latest is None:
            self._started = self._clock()  # loading took its own time
            if progress.n_resumed:
                self._console.info(
                    f"going on with chunk {progress.n_resumed + 1} of {progress.n_chunk}: "
                    "the ones before it are kept from an interrupted run"
                )
        self.latest = progress
        now = self._clock()
        if progress.n_chunks_done > self._n_rendered and not self._console.json:
            self._write_chunks(progress, now)
        every = REWRITE_SECONDS if self._console.shows_progress else LINE_SECONDS
        if progress.n_chunks_done < progress.n_chunk and now - self._shown >= every:
            self._shown = now
            if self._console.shows_progress:
                self._console.progress(self.line(progress, now))
            else:
                self._console.info(self.line(progress, now))

    def _write_chunks(self, progress: Progress, now: float) -> None:
        """Results of the chunks finished since the last call, those of an interrupted run first."""
        text = self._render_chunks(progress, self._n_rendered)
        self._console.progress("")
        takes_line = self._console.shows_progress and is_terminal(sys.stdout) and not text.endswith("\n")
        if takes_line and self._n_rendered <= progress.n_resumed < progress.n_chunks_done:
            self._console.info(self.line(progress, now))  # once: results stand in the terminal's line from here on
        self._n_rendered = progress.n_chunks_done
        self._console.write_text(text)

    def finish(self) -> None:
        """Clear the line; after an interruption say what is kept."""
        self._console.progress("")

    def say_kept(self, n_kept: int) -> None:
        """After an interruption: finished chunks are not lost."""
        if self.latest is not None and n_kept:
            self._console.info(
                f"{n_kept} of {self.latest.n_chunk} chunks are finished and kept: the same command goes on from there"
            )

    def line(self, progress: Progress, now: float) -> str:
        """One line; the first half of a chunk makes no rows, so rows count for its second half."""
        inside = 0.5 + 0.5 * progress.chunk_rows_done / progress.rows_per_chunk if progress.chunk_rows_done else 0.0
        computed = progress.n_chunks_done - progress.n_resumed + inside
        words = [f"chunk {min(progress.n_chunks_done + 1, progress.n_chunk)} of {progress.n_chunk}"]
        if computed > 0:
            left = (now - self._started) / computed * (progress.n_chunk - progress.n_resumed - computed)
            words.append(f"about {show_duration(left)} left")
        if progress.n_chunks_done:
            words.append(self._describe(progress))
        return ", ".join(words)


def show_duration(seconds: float) -> str:
    """Rounded to what matters: ``41 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
