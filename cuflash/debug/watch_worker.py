"""The process that runs the versions of a kernel that is being edited; see `tuning.worker`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuflash import settings
from cuflash.tuning.operation import Trial
from cuflash.tuning.worker import GpuRig, main


class EditedTrial:
    """A trial whose check looks at the kernel's text, and whose timed calls do not.

    Reading a dozen files costs more than many a kernel takes: the timer would find one call in a sample.
    """

    def __init__(self, trial: Trial, forget: Callable[[], None]) -> None:
        self.trial = trial
        self.forget = forget
        self.looking = True
        setattr(settings, "watch_kernels", lambda: self.looking)  # noqa: B010 - this process's alone

    def check(self, config: Any) -> Any:
        """Load what the text says now, run it on poisoned outputs and compare with float64."""
        self.looking = True
        return self.trial.check(config)

    def call(self, config: Any) -> Callable[[], Any]:
        """Give the call to time, of what was checked last."""
        self.forget()
        self.looking = False
        return self.trial.call(config)


class EditedRig(GpuRig):
    """Versions of one kernel on the current GPU."""

    def prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the arrays of the problem ready."""
        answer = super().prepare(request)
        from cuflash.gpu import forward

        self.trial: Trial = EditedTrial(self.trial, forward.forget)
        return answer


if __name__ == "__main__":
    main(EditedRig())
