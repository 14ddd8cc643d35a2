"""What a user declares: queues, topics, consumers, and the app that holds them together."""

from procession.app.application import App
from procession.app.consumers import ConsumerDefinition

__all__ = ["App", "ConsumerDefinition"]
