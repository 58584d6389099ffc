"""Shows the progress bar of `LLM`: prompts that are finished, and tokens per second."""

import time
from types import TracebackType

from tqdm import tqdm


class PromptProgressBar:
    """A tqdm bar that counts answered prompts, of `total`, and shows the rates of prompt tokens and generated
    tokens."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._started = time.monotonic()
        self._num_read = self._num_written = 0
        self._bar = tqdm(total=total, desc="Processed prompts", disable=not shown, dynamic_ncols=True)

    def done(self, num_read: int, num_written: int = 0) -> None:
        """Count one answered prompt, which had `num_read` prompt tokens and `num_written` generated tokens."""
        self._num_read += num_read
        self._num_written += num_written
        # The clock may not have advanced since the start if everything was cached.
        seconds = max(time.monotonic() - self._started, 1e-9)
        speeds = f"input: {self._num_read / seconds:.2f} toks/s, output: {self._num_written / seconds:.2f} toks/s"
        # Not refreshed here: `update` draws the bar, and at most every 0.1 s.
        self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update(1)

    def __enter__(self) -> "PromptProgressBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
