"""Measures the device time of stages."""

import time

import torch


class StageClock:
    """Measures the seconds between marks by CUDA events on a GPU, else by the host's clock.

    Args:
        device: the device that the stages run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on = device, device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._times: list[tuple[str, float]] = []

    def synchronize(self) -> None:
        """Waits for the device."""
        if self._on:
            torch.cuda.synchronize(self._device)

    def start(self) -> None:
        """Removes earlier marks and marks the beginning of the first stage."""
        self._events, self._times = [], []
        self.mark("")

    def mark(self, name: str) -> None:
        """Marks the end of the stage ``name``."""
        if self._on:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((name, event))
        else:
            self._times.append((name, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of the stages since ``start``, summed by name. Wait for the device before."""
        total: dict[str, float] = {}
        for (_, before), (name, after) in zip(self._times, self._times[1:], strict=False):
            total[name] = total.get(name, 0.0) + after - before
        for (_, mark), (name, later) in zip(self._events, self._events[1:], strict=False):
            total[name] = total.get(name, 0.0) + mark.elapsed_time(later) / 1000
        return total
