from __future__ import annotations

from django.urls import path

from examples.demo_chat import views

urlpatterns = [
    path("", views.demo_page, name="demo_chat"),
    path("start", views.start_session, name="demo_chat_start"),
    path("state", views.session_state, name="demo_chat_state"),
]
