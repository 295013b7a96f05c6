"""A network's run, taped once and played again for every draw.

The tape is the list of tensor operations that a network does for inputs of one shape. Played for
many draws, what does not depend on a draw is run once; a batch norm behind a convolution is folded
into it, so that it costs nothing; and a result that nobody needs any more is overwritten in place.
Nothing of the network is called, changed or copied. A tape can also be cut where draws come in, so
that training runs what stands before once.

A tape knows nothing of Python: a network that decides by the values in its tensors, or computes
outside torch, cannot be taped. The first is noticed while taping, the second by playing the tape
for other inputs and comparing (see `sampling.Runner`).
"""

from bayesify.tape.cutting import Cut
from bayesify.tape.kernels import channels_last
from bayesify.tape.playing import Tape
from bayesify.tape.recording import CannotTapeError, Recorder

__all__ = ["CannotTapeError", "Cut", "Recorder", "Tape", "channels_last"]
