"""What can go wrong, one type each.

Every message names the argument, the value received, what is allowed and the next step. Every
error is also a `ValueError`, `TypeError`, `OSError` or `ImportError`, so that code which knows
nothing of bayesify can catch it. It is raised before anything is changed.
"""


class BayesifyError(Exception):
    """The parent of every error that bayesify raises on purpose."""


class SettingError(BayesifyError, ValueError):
    """A setting outside what is allowed, or settings that contradict each other."""


class NothingToRandomiseError(BayesifyError, ValueError):
    """The network has no tensor that the method could make random."""


class UnknownSiteError(BayesifyError, ValueError):
    """A pattern of `where` matches none of the network's sites."""


class UnsupportedNetworkError(BayesifyError, TypeError):
    """The network cannot be copied or run by bayesify."""


class WrongNetworkError(BayesifyError, ValueError):
    """A file belongs to another network, or the network's weights are no longer the same."""


class CorruptFileError(BayesifyError, OSError):
    """A file is truncated, damaged, or not one of bayesify's."""


class DataError(BayesifyError, ValueError):
    """Data that cannot be used: empty, of the wrong shape, out of range, or not finite."""


class NonFiniteError(BayesifyError, ValueError):
    """The network or the training produced a NaN or an infinity."""


class MissingExtraError(BayesifyError, ImportError):
    """An optional library is needed and not installed."""


class BayesifyWarning(UserWarning):
    """Something a user should know that does not stop the work."""
