"""When stages for a further shape of tree are made: once they would have saved as much as making them costs.

On a GPU kernels are compiled and graphs captured for them, which takes seconds the first time. Waiting until
as much was missed costs at most twice what was best in hindsight, however long the text turns out to be
(Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988: the ski rental rule).
"""

from collections.abc import Mapping, Sequence

from triforce_tree.decoding.choice.passes import Option


class Preparation:
    """The shapes whose stages are not there yet.

    Attributes:
        seconds: that making the stages of a shape is expected to take, by its number.
        missed: seconds that its passes would have saved so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.missed: dict[int, float] = {}

    def begin(self, seconds: Mapping[int, float]) -> None:
        """Hold these shapes back."""
        self.seconds = dict(seconds)

    def ready(self, shape: int) -> bool:
        """Whether passes may take trees of this shape."""
        return shape not in self.seconds

    def count(self, options: Sequence[Option]) -> None:
        """Before a pass: add up what the shapes that are held back would save, and release those that pay.

        Args:
            options: what is expected of each kind of pass; at least one, plain decoding, is of a ready shape.
        """
        if not self.seconds:
            return
        best = max((o for o in options if self.ready(o.kind.shape)), key=lambda option: option.rate)
        for shape in list(self.seconds):
            rate = max((o.rate for o in options if o.kind.shape == shape), default=0.0)
            if rate > best.rate:
                # Of the best pass that can be made now, beside one as fast as those of this shape.
                saved = best.tokens * (1 / best.rate - 1 / rate)
                self.missed[shape] = self.missed.get(shape, 0.0) + saved
                if self.missed[shape] >= self.seconds[shape]:
                    del self.seconds[shape]
