from __future__ import annotations

from django.urls import path

from examples.demo_chat import views

urlpatterns = [
    path("", views.demo_page, name="demo_chat"),
    path("begin", views.start_session, name="demo_chat_begin"),
    path("state", views.session_state, name="demo_chat_state"),
]
