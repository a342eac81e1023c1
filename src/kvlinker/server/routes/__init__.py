"""The routes, one module per resource."""

from kvlinker.server.routes import chat, completions, context_caches, link, models, status, tokenize

ROUTERS = (
    chat.router,
    completions.router,
    context_caches.router,
    link.router,
    models.router,
    status.router,
    tokenize.router,
)

__all__ = ["ROUTERS"]
