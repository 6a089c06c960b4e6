"""Route the WebSocket address of take-overs."""

from __future__ import annotations

from django.urls import re_path

from rpa_tasks.takeover.page_socket import serve_take_over

websocket_urlpatterns = [re_path(r"^ws/v1/take-overs/(?P<take_over>\d{1,18})$", serve_take_over)]  # type: ignore[arg-type]
