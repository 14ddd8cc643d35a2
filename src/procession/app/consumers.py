"""A consumer as declared, checked at registration, and what the consume flow asks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from procession.app.handlers import Handler, HandlerCall
from procession.app.middleware import Middleware
from procession.app.queues import Queue, Queues, check_name
from procession.app.resources import Resources
from procession.config import RetryPolicy, refuse
from procession.core.fingerprints import fingerprint, fingerprint_of_fields
from procession.core.keys import key_policy
from procession.errors import ConfigurationError, MessageError, Reason
from procession.flows.batch import Invoke
from procession.message import BodyFormat, Delivery

Validator = Callable[[Any], object]
BY_ID = key_policy(None)
POISON_COMING = ("park", "block")


class ConsumerDefinition:
    """A named subscription with its handlers; implements `procession.flows.batch.Consumer`.

    Made by `app.consumer`. Add handlers for more message types of the same queue with
    `@consumer.on(Type)`: they share its name, its inbox and its sessions' order.
    """

    def __init__(  # noqa: PLR0913  made by app.consumer alone
        self,
        queue: Queue,
        queues: Queues,
        *,
        name: str,
        fingerprint: Sequence[str] | None,
        validators: Sequence[Validator],
        validate_session: Callable[[Any], object] | None,
        retry: RetryPolicy,
        concurrency: int,
        on_conflict: Literal["dead-letter", "alert"],
        on_poison: object,
        commit: Literal["batch", "each"],
    ) -> None:
        self.name = check_name(name, "consumer")
        self.queue = queue
        self.retry = retry
        self.concurrency = concurrency
        self.on_conflict: Literal["dead-letter", "alert"] = on_conflict
        self.commit: Literal["batch", "each"] = commit
        self.route = queues.outgoing
        self._queues = queues
        self._handlers: dict[str, HandlerCall] = {}
        self._only: HandlerCall | None = None
        self._fields = tuple(fingerprint) if fingerprint is not None else None
        self._validators = tuple(validators)
        self._validate_session = validate_session
        self.hashed_as_it_stands = self._fields is None
        refuse(self._faults(on_poison), f"consumer {name!r}")

    def _faults(self, on_poison: object) -> list[str]:
        faults = []
        if on_poison in POISON_COMING:
            faults.append(
                f"on_poison={on_poison!r} is not there yet: 'continue' dead-letters a message that "
                "keeps failing and lets its session go on"
            )
        elif on_poison != "continue":
            faults.append(f"on_poison={on_poison!r}: it is 'continue'")
        if self.on_conflict not in ("dead-letter", "alert"):
            faults.append(f"on_conflict={self.on_conflict!r}: it is 'dead-letter' or 'alert'")
        if self.commit not in ("batch", "each"):
            faults.append(f"commit={self.commit!r}: it is 'batch' or 'each'")
        if self.concurrency < 1:
            faults.append(f"concurrency={self.concurrency!r}: at least 1")
        if self._fields is not None and not self._fields:
            faults.append("fingerprint=(): name at least one field")
        return faults

    @property
    def is_async(self) -> bool:
        """Whether any handler is an `async def`."""
        return any(handler.is_async for handler in self._handlers.values())

    @property
    def keyed_by_id(self) -> bool:
        """Whether the dedup key is the producer's message id."""
        return self.queue.key is None or self.queue.key.spec is None

    def on(self, type_: type) -> Callable[[Handler], Handler]:
        """Handle another message type of this queue in the same order.

        Args:
            type_: the payload class; its message type is its name, or what `app.message` gave it.

        Raises:
            ConfigurationError: the type has a handler already, or the handler's annotation names
                another type.

        Example:
            >>> from procession import App
            >>> app = App("doc", store="sqlite:///doc.db")
            >>> class Paid: ...
            >>> class Shipped: ...
            >>> @app.consumer("orders", name="orders")
            ... def paid(message: Paid) -> None: ...
            >>> @paid.on(Shipped)
            ... def shipped(message: Shipped) -> None: ...
        """

        def register(function: Handler) -> Handler:
            self.add(function, type_)
            return function

        return register

    def add(self, function: Handler, type_: type | None = None) -> None:
        """Register a handler (see `on`); without `type_` its annotation says the type."""
        what = f"consumer {self.name!r}, handler {getattr(function, '__name__', function)!r}"
        handler = HandlerCall(function, what)
        if type_ is not None and handler.payload_type not in (type_, Any):
            raise ConfigurationError(
                f"{what} takes {handler.payload_type!r}, but is registered for {type_!r}"
            )
        named: Any = type_ if type_ is not None else handler.payload_type
        type_name = self._queues.type_name(named) if isinstance(named, type) else ""
        if type_name in self._handlers:
            raise ConfigurationError(f"{what}: message type {type_name!r} has a handler already")
        self._handlers[type_name] = handler
        self._only = handler if len(self._handlers) == 1 else None

    def bind(self, middlewares: Sequence[Middleware], resources: Resources) -> None:
        """Make the handlers ready to run; see `HandlerCall.bind`."""
        for handler in self._handlers.values():
            handler.bind(middlewares, resources)

    def key_of(self, delivery: Delivery) -> bytes:
        """See `flows.batch.Consumer.key_of`."""
        policy = self.queue.key or BY_ID
        payload = self.read(delivery)[1] if policy.needs_payload else None
        try:
            return policy.key(payload, delivery.message_id, delivery.headers)
        except MessageError:
            raise
        except Exception as error:
            raise MessageError(
                Reason.BAD_KEY, f"the {policy.description} could not be made: {error!r}"
            ) from error

    def fingerprint_of(self, delivery: Delivery) -> bytes:
        """See `flows.batch.Consumer.fingerprint_of`."""
        if self._fields is not None:
            return fingerprint_of_fields(self.read(delivery)[1], self._fields)
        return fingerprint(delivery.body, canonical=delivery.format != BodyFormat.JSON)

    def read(self, delivery: Delivery) -> tuple[Invoke, Any]:
        """See `flows.batch.Consumer.read`."""
        handler = self._handlers.get(delivery.type)
        if handler is None:
            handler = self._handler_for(delivery.type)
        try:
            payload = handler.decode(delivery.body)
        except MessageError:
            raise
        except Exception as error:
            # A check of the user's own type raised what no decoder expects.
            raise MessageError(
                Reason.INVALID_PAYLOAD, f"{handler.payload_type!r} refused it: {error!r}"
            ) from error
        if self._validators or self._validate_session is not None:
            self._validate(payload, delivery)
        return handler, payload

    def decode(self, type_: str, body: bytes) -> Any:
        """Return a body as its handler's payload, before any validator: for tools that apply the
        queue's rules to it.

        Raises:
            MessageError: no handler takes the type, or the body is not of it.
        """
        return (self._handlers.get(type_) or self._handler_for(type_)).decode(body)

    def _handler_for(self, type_: str) -> HandlerCall:
        """Choose for a type without a handler of its own."""
        untyped = self._handlers.get("")
        if untyped is not None:
            return untyped
        if not type_ and self._only is not None:
            return self._only
        known = ", ".join(sorted(self._handlers))
        raise MessageError(
            Reason.UNKNOWN_TYPE,
            f"consumer {self.name!r} has no handler for message type {type_!r} (it has: "
            f"{known}): add one with @consumer.on, or discard the message",
        )

    def _validate(self, payload: Any, delivery: Delivery) -> None:
        for validator in self._validators:
            try:
                verdict = validator(payload)
            except MessageError:
                raise
            except Exception as error:
                raise MessageError(
                    Reason.INVALID_PAYLOAD, f"{_name(validator)} refused it: {error}"
                ) from error
            if verdict is False:
                raise MessageError(Reason.INVALID_PAYLOAD, f"{_name(validator)} refused it")
        if self._validate_session is not None:
            self._check_session(self._validate_session, payload, delivery)

    def _check_session(
        self, rule: Callable[[Any], object], payload: Any, delivery: Delivery
    ) -> None:
        try:
            expected = rule(payload)
        except Exception as error:
            raise MessageError(
                Reason.SESSION_MISMATCH, f"validate_session failed on the payload: {error}"
            ) from error
        session = None if delivery.session is None else delivery.session.decode(errors="replace")
        if expected is None or str(expected) != session:
            raise MessageError(
                Reason.SESSION_MISMATCH,
                f"session key does not fit: the message came in session {session!r}, its payload "
                f"belongs to {expected!r}; the producer set a wrong key",
            )


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)
