"""How much to draft before asking level 2, from what drafting has brought so far."""

import math

# Weight of the newest pass in the running means.
_NEW = 0.15
# Passes before the verdict that drafting does not pay, and plain ones before it is tried again.
_TRIAL, _PAUSE = 12, 64


class Pace:
    """Chooses the rounds of levels 0 and 1 before each pass of level 2; 0 for a plain pass.

    With acceptance a per token and m tokens gathered a round, n = m r tokens bring (1 - a^(n+1)) / (1 - a)
    in r * t_round + t_full seconds (Leviathan et al., arXiv 2211.17192, equation 1). The best r is chosen
    from running means of a, m and the times.

    Args:
        depth: of the draft's trees.
        reach: most tokens that a chain can hold.
        fixed: always this many rounds.
    """

    def __init__(self, depth: int, reach: int, fixed: int | None = None) -> None:
        self.depth, self.reach, self.fixed = depth, reach, fixed
        self._measures = True
        self.acceptance = 0.95
        self.gathered = 1 + 0.5 * depth
        self.round_seconds = self.full_seconds = 0.0
        self.plain_seconds: float | None = None
        self._passes = self._plain = 0

    def assume(self, a_round: float, a_pass: float) -> None:
        """Go by these costs, in any unit, and by no clock: choices are then functions of the draws alone."""
        self._measures = False
        self.round_seconds, self.full_seconds = a_round, a_pass

    def rounds(self) -> int:
        """For the next pass."""
        if self.fixed is not None:
            return self.fixed
        if self._plain:
            self._plain -= 1
            return 0
        if self.full_seconds == 0:
            return max(1, math.ceil(self.reach / self.gathered))
        best = max(range(1, math.ceil(self.reach / self.gathered) + 2), key=self.rate)
        plain = 1 / (self.plain_seconds or self.full_seconds)
        if self._passes >= _TRIAL and self.rate(best) < plain:
            self._plain, self._passes = _PAUSE, _TRIAL - 2
            return 0
        return best

    def rate(self, rounds: int) -> float:
        """Expected tokens a second."""
        chain = min(self.reach, rounds * self.gathered)
        a = min(self.acceptance, 0.9999)
        expected = float((1 - a ** (chain + 1)) / (1 - a))
        return expected / (rounds * self.round_seconds + self.full_seconds)

    def drafted(self, rounds: int, gathered: float, accepted: int, refused: int) -> None:
        """Take note of a pass: tokens gathered a sequence, and how many level 2 accepted and refused."""
        self._passes += 1
        new = 1.0 if self._passes == 1 else max(_NEW, 1 / self._passes)
        self.gathered += new * (gathered / rounds - self.gathered)
        if accepted + refused:
            # A refusal ends the chain, so accepted / (accepted + refused) estimates a.
            share = accepted / (accepted + refused)
            self.acceptance += (_NEW / 2) * (share - self.acceptance)

    def timed(self, seconds: dict[str, float], rounds: int) -> None:
        """Device seconds of the stages of one pass."""
        if not self._measures:
            return
        if rounds == 0:
            self.plain_seconds = _mean(self.plain_seconds or 0.0, seconds["plain"])
            return
        drafting = sum(s for name, s in seconds.items() if name != "full")
        self.round_seconds = _mean(self.round_seconds, drafting / rounds)
        self.full_seconds = _mean(self.full_seconds, seconds["full"])


def _mean(old: float, new: float) -> float:
    return new if old == 0 else old + _NEW * (new - old)
