"""One tree of errors. Each knows its HTTP status, its OpenAI error type, its exit code and whether a retry may help.

    TollbridgeError                   500  internal_error         exit 1
    ├── RequestError                  400  invalid_request_error  exit 2   the caller's input is wrong
    │   ├── NotFoundError             404  not_found_error        no such object here
    │   │   └── ModelNotFoundError    404  not_found_error
    │   ├── ContextLengthError        400  context_length_exceeded
    │   ├── UnsupportedError          400  unsupported            a feature this deployment does not have
    │   └── AuthenticationError       401  authentication_error
    ├── UnavailableError              503  unavailable            nobody can serve it now (retryable)
    │   ├── OverloadedError           429  overloaded             a queue is full (retryable)
    │   ├── DeadlineError             504  deadline_exceeded      the caller's own deadline has passed
    │   └── UpstreamError             502  upstream_error         a worker failed or vanished (retryable)
    ├── TransferError                 500  transfer_error         a KV transfer ended badly (retryable)
    │   ├── HandshakeError                                        the two sides must not exchange KV
    │   ├── ProtocolError                                         a peer sent bytes that the protocol does not allow
    │   └── IntegrityError                                        a checksum, id or digest does not fit
    ├── ConfigError                   500  config_error           exit 2   the cluster file or a flag is wrong
    └── StartupError                  500  startup_error          exit 3   a process could not start (do not restart it)

A message is one sentence: what happened, to which object, and what to do.
"""

from __future__ import annotations

from typing import ClassVar


class TollbridgeError(Exception):
    """Base of every error that this package raises on purpose."""

    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "internal_error"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the request field at fault, as OpenAI's error bodies name it


class RequestError(TollbridgeError):
    """The caller's input is wrong; the same request will fail again."""

    status = 400
    error_type = "invalid_request_error"
    exit_code = 2


class NotFoundError(RequestError):
    """The request names something that does not exist here."""

    status = 404
    error_type = "not_found_error"


class ModelNotFoundError(NotFoundError):
    """The request names a model that this server does not serve."""


class ContextLengthError(RequestError):
    """Prompt and requested output do not fit the model's context or the KV cache."""

    error_type = "context_length_exceeded"


class UnsupportedError(RequestError):
    """The request (or model) asks for something this deployment does not have."""

    error_type = "unsupported"


class AuthenticationError(RequestError):
    """No valid API key."""

    status = 401
    error_type = "authentication_error"


class UnavailableError(TollbridgeError):
    """Nobody can serve the request now; a later try may succeed."""

    status = 503
    error_type = "unavailable"
    retryable = True

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s  # when a later try may succeed


class OverloadedError(UnavailableError):
    """A bounded queue is full."""

    status = 429
    error_type = "overloaded"


class DeadlineError(UnavailableError):
    """The deadline that the caller (or the configuration) set for the request has passed."""

    status = 504
    error_type = "deadline_exceeded"


class UpstreamError(UnavailableError):
    """A worker refused, failed or vanished."""

    status = 502
    error_type = "upstream_error"


class TransferError(TollbridgeError):
    """A KV transfer ended badly; decode recomputes."""

    error_type = "transfer_error"
    retryable = True


class HandshakeError(TransferError):
    """Two processes must not exchange KV; the message names the field and both values."""


class ProtocolError(TransferError):
    """A peer sent bytes that the protocol does not allow; the connection is closed."""


class IntegrityError(TransferError):
    """A checksum, transfer id, incarnation or digest does not fit."""


class ConfigError(TollbridgeError):
    """The cluster file, an environment variable or a flag is wrong."""

    error_type = "config_error"
    exit_code = 2


class StartupError(TollbridgeError):
    """A process could not start for a reason that a restart will not mend."""

    error_type = "startup_error"
    exit_code = 3
