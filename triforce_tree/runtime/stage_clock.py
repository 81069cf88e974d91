"""Measures the device time of stages."""

import time

import torch


class Mark:
    """Marks a point in the work of a device: by a CUDA event on a GPU, else by the time of the host.

    Args:
        device: the device, whose present stream is meant.
    """

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    @property
    def reached(self) -> bool:
        """Returns whether the device has done all work before the mark."""
        return self._event is None or self._event.query()

    def wait(self) -> float:
        """Waits for the work before the mark; returns how many seconds."""
        if self._event is None:
            return 0.0
        start = time.perf_counter()
        self._event.synchronize()
        return time.perf_counter() - start

    def since(self, earlier: "Mark") -> float:
        """Returns the seconds of the work after an earlier mark. Wait for this one before."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        seconds: float = earlier._event.elapsed_time(self._event) / 1000
        return seconds


class StageClock:
    """Measures the seconds between marks.

    Args:
        device: the device that the stages run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Mark]] = []

    def synchronize(self) -> None:
        """Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def start(self) -> None:
        """Removes earlier marks and marks the beginning of the first stage."""
        self._marks = [("", Mark(self._device))]

    def wait_for_start(self) -> float:
        """Waits for the work before the first stage; returns how many seconds."""
        return self._marks[0][1].wait()

    def mark(self, name: str) -> None:
        """Marks the end of the stage ``name``."""
        self._marks.append((name, Mark(self._device)))

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the stages since ``start``, summed by name. Wait for the device before."""
        total: dict[str, float] = {}
        for (_, before), (name, after) in zip(self._marks, self._marks[1:], strict=False):
            total[name] = total.get(name, 0.0) + after.since(before)
        return total
