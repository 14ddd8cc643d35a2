"""Code around handlers: one file a middleware, each a generator function with one `yield`.

What stands before the `yield` runs before the handler, what stands behind it after; a failure of
the handler is raised at the `yield`. The same middleware serves `def` and `async def` handlers.
"""

from procession.app.middleware.chain import Middleware, around
from procession.app.middleware.correlation import correlation, correlation_headers
from procession.app.middleware.timing import timing

__all__ = ["Middleware", "around", "correlation", "correlation_headers", "timing"]
