from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView
from django.views.i18n import JavaScriptCatalog

from scheduling.api.app import api
from scheduling.web import views

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index"), name="home"),
    # Before the admin's own route, which has only Django's messages.
    path("admin/jsi18n/", JavaScriptCatalog.as_view(packages=["django.contrib.admin", "scheduling"])),
    path("admin/", admin.site.urls),
    path("i18n/", include("django.conf.urls.i18n")),
    path("api/v1/", api.urls),
    path("health/live", views.report_liveness, name="live"),
    path("health/ready", views.report_readiness, name="ready"),
    path("gate/administrators", views.check_administrator, name="administrators"),
    path("metrics", views.export_metrics, name="metrics"),
    path("u/<str:token>", views.unsubscribe, name="unsubscribe"),
]

if getattr(settings, "AFTERTOUCH_DEMO", False):
    urlpatterns.append(path("demo/chat/", include("examples.demo_chat.urls")))
