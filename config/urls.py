from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView
from django.views.i18n import JavaScriptCatalog

from rpa_tasks.api import jobs, shops
from scheduling.admin.dashboard.overview import dismiss_checklist
from scheduling.admin.navigation import answer_search
from scheduling.api.app import api
from scheduling.web import views
from sessions import api as live_chats
from sessions.chat_hooks import receive_chat_hook

for router in (jobs.router, shops.router, live_chats.router):
    api.add_router("", router)

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index"), name="home"),
    # Before the admin's own route, which has only Django's messages.
    path("admin/jsi18n/", JavaScriptCatalog.as_view(packages=["django.contrib.admin", "scheduling"])),
    # Before Unfold's search, which finds names of models and keeps results for five minutes.
    path("admin/search/", admin.site.admin_view(answer_search)),
    path("admin/first-hour/dismiss/", admin.site.admin_view(dismiss_checklist), name="dismiss_checklist"),
    path("admin/flower/", admin.site.admin_view(views.open_flower), name="flower"),
    path("admin/", admin.site.urls),
    path("i18n/", include("django.conf.urls.i18n")),
    path("api/v1/", api.urls),
    path("health/live", views.report_liveness, name="live"),
    path("health/ready", views.report_readiness, name="ready"),
    path("gate/administrators", views.check_administrator, name="administrators"),
    path("metrics", views.export_metrics, name="metrics"),
    path("hooks/<str:channel>/", views.receive_callback, name="vendor_callback"),
    path("hooks/<str:channel>/<str:token>", views.receive_callback, name="vendor_report"),
    path("chat-hooks/<str:system>", receive_chat_hook, name="chat_hook"),
    path("l/<str:token>", views.follow_link, name="link"),
    path("u/<str:token>", views.unsubscribe, name="unsubscribe"),
]

if settings.AFTERTOUCH_DEMO:
    urlpatterns.append(path("demo/chat/", include("examples.demo_chat.urls")))
