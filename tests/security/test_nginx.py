"""The recipe for nginx, taken as it is, before a web process with production's settings."""

import base64
import json
import os
import shutil
import socket
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import urllib3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from django.conf import settings
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.contrib.auth.models import User
from django.utils.timezone import now
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from config.local.processes import select_port
from rpa_tasks.models import ExecutionNode, Shop, TakeOver
from rpa_tasks.models import Platform as RpaPlatform
from scheduling.models import FailedLogin
from tests.scheduling.api.serving import serving
from tests.support.second_connection import run_concurrently
from tests.support.thread_servers import serving_in_thread
from tests.support.waiting import WAIT_LIMIT, eventually

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "aftertouch.example"
RECIPE = settings.BASE_DIR / "deploy" / "nginx" / "aftertouch.conf"
AROUND = """
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
{user}
events {{ }}
http {{
    access_log {folder}/other.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/aftertouch.conf;
}}
"""


class Flower(BaseHTTPRequestHandler):
    """Whom Flower would have let in."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"the workers for " + self.headers.get("Authorization", "").encode())

    def log_message(self, *args):
        """Discard the log line."""


def write_certificate(folder):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    at = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(at - timedelta(days=1))
        .not_valid_after(at + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "fullchain.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "privkey.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


class NginxClient:
    """What a browser that knows the site by its name sees."""

    def __init__(self, folder, plain, tls, **options):
        self.folder, self.plain, self.tls = folder, plain, tls
        self.pool = urllib3.HTTPSConnectionPool(
            "127.0.0.1", tls, server_hostname=NAME, assert_hostname=NAME, ca_certs=str(folder / "fullchain.pem"),
            maxsize=50, timeout=WAIT_LIMIT, retries=False, **options,
        )  # fmt: skip

    def __call__(self, method, path, body=None, **headers):
        named = {"Host": NAME, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return self.pool.request(method, path, body=body, headers=named, redirect=False)


@pytest.fixture(scope="module")
def nginx(django_db_setup, django_db_blocker, tmp_path_factory):
    with django_db_blocker.unblock():
        yield from run_nginx(tmp_path_factory.mktemp("nginx"))


def run_nginx(tmp_path):
    binary = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if binary is None:
        pytest.skip("missing service: nginx")
    write_certificate(tmp_path)
    production = {
        "DJANGO_SETTINGS_MODULE": "config.settings.production",
        "DJANGO_SECRET_KEY": "0123456789abcdef" * 4,
        "DJANGO_ALLOWED_HOSTS": NAME,
        "AFTERTOUCH_BASE_URL": f"https://{NAME}",
        "AFTERTOUCH_SECRETS_KEYS": "0123456789abcdef" * 3,
        "AFTERTOUCH_STATE_DIR": str(tmp_path),
        "FLOWER_BASIC_AUTH": "ops:hush,other:hush",
    }
    flower = ThreadingHTTPServer(("127.0.0.1", 0), Flower)
    with serving_in_thread(flower), serving(**production) as web:
        plain, tls = select_port(), select_port()
        recipe = RECIPE.read_text("utf-8")
        for ours, theirs in (
            ("listen 80;", f"listen 127.0.0.1:{plain};"),
            ("listen 443 ", f"listen 127.0.0.1:{tls} "),
            ("127.0.0.1:8000", web.removeprefix("http://")),
            ("127.0.0.1:5555", f"127.0.0.1:{flower.server_port}"),
            ("/etc/ssl/aftertouch", str(tmp_path)),
            ("/var/log/nginx", str(tmp_path)),
        ):
            assert ours in recipe, ours
            recipe = recipe.replace(ours, theirs)
        (tmp_path / "aftertouch.conf").write_text(recipe, "utf-8")
        around = AROUND.format(folder=tmp_path, user="user root;" if os.geteuid() == 0 else "")
        (tmp_path / "nginx.conf").write_text(around, "utf-8")
        command = [binary, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-e", str(tmp_path / "error.log")]
        checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=WAIT_LIMIT)
        assert checked.returncode == 0, checked.stderr
        running = subprocess.Popen(command)
        try:
            nginx = NginxClient(tmp_path, plain, tls)
            # nginx waits a minute for an answer, and the start of a web process may take longer.
            urllib3.request("GET", f"{web}/health/live", redirect=False, retries=False, timeout=WAIT_LIMIT)
            eventually(lambda: (tmp_path / "nginx.pid").exists() and (tmp_path / "nginx.pid").read_text())
            yield nginx
            nginx.pool.close()
        finally:
            running.terminate()
            running.wait(WAIT_LIMIT)


def test_nginx_recipe_enforces_tls_host_and_limits(nginx):
    """One start for all, as it is the start that takes its time."""
    # Pages come by TLS, with HSTS, and plain requests are sent there.
    page = nginx("GET", "/admin/login/")
    assert page.status == 200
    assert "max-age" in page.headers["Strict-Transport-Security"]
    there = urllib3.request("GET", f"http://127.0.0.1:{nginx.plain}/admin/?a=b", redirect=False, retries=False)
    assert (there.status, there.headers["Location"]) == (301, f"https://{NAME}/admin/?a=b")

    # Another name is not served.
    stranger = urllib3.HTTPSConnectionPool(
        "127.0.0.1", nginx.tls, server_hostname="evil.example", cert_reqs="CERT_NONE", retries=False
    )
    with pytest.raises(urllib3.exceptions.SSLError):
        stranger.request("GET", "/")
    stranger.close()

    # Bodies have an end.
    assert nginx("POST", "/api/v1/events", b"0" * 2_000_000).status == 413

    # A WebSocket is let through to the application, which wants a token, and the token is not in the log.
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Version": "13"}
    chat = NginxClient(nginx.folder, nginx.plain, nginx.tls)
    answer = chat("GET", "/ws/v1/sessions/s1?token=hush-hush", Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==", **upgrade)
    assert answer.status == 101
    answer.close()
    chat.pool.close()
    eventually(lambda: "/ws/v1/sessions/s1" in (nginx.folder / "aftertouch.log").read_text())
    assert "hush-hush" not in (nginx.folder / "aftertouch.log").read_text()


def test_nginx_serves_metrics_and_probes_only_to_own_networks(nginx):
    """This address is internal, another one is not."""
    outside = NginxClient(nginx.folder, nginx.plain, nginx.tls, source_address=("127.0.0.2", 0))
    assert outside("GET", "/admin/login/").status == 200
    for path in ("/metrics", "/health/live", "/health/ready"):
        assert nginx("GET", path).status == 200, path
    for path in ("/metrics", "/health/live", "/health/ready", "//health/ready", "/health/./ready", "/health/%72eady"):
        assert outside("GET", path).status == 403, path
    outside.pool.close()


def test_nginx_serves_flower_only_to_administrators(nginx):
    assert nginx("GET", "/gate/administrators").status == 404
    assert nginx("GET", "/flower/").status == 401
    for name, superuser, status in (("viewer", False, 403), ("root", True, 200)):
        answer = nginx("GET", "/flower/", Cookie=open_session(nginx, name, superuser=superuser))
        assert answer.status == status
        assert (b"the workers" in answer.data) is superuser
        # An administrator needs no second login, and never sees the one that nginx forwards.
        login = base64.b64encode(b"ops:hush")
        assert (login in answer.data) is superuser
        assert login.decode() not in str(answer.headers)


def test_nginx_leads_take_over_to_its_page_and_records_the_real_address(nginx):
    shop = Shop.objects.create(platform=RpaPlatform.objects.create(key="pdd"), shop_id="s1")
    ExecutionNode.objects.create(name="n1", seen_at=now(), started_at=now(), slots=1)
    outside = NginxClient(nginx.folder, nginx.plain, nginx.tls, source_address=("127.0.0.2", 0))
    session = open_session(outside, "ann", superuser=True)
    page, token = f"/admin/rpa_tasks/shop/{shop.pk}/take-over/", "t" * 32
    answer = outside(
        "POST", page, f"csrfmiddlewaretoken={token}&do=start".encode(), Cookie=f"csrftoken={token}; {session}",
        Content_Type="application/x-www-form-urlencoded", Referer=f"https://{NAME}{page}", X_Forwarded_For="6.6.6.6",
    )  # fmt: skip
    assert answer.status == 302
    outside.pool.close()
    row = TakeOver.objects.get()
    assert (row.username, row.address) == ("ann", "127.0.0.2")

    def open_socket(origin):
        trusted = ssl.create_default_context(cafile=str(nginx.folder / "fullchain.pem"))
        sock = socket.create_connection(("127.0.0.1", nginx.tls), timeout=WAIT_LIMIT)
        return connect(
            f"wss://{NAME}/ws/v1/take-overs/{row.pk}", sock=sock, ssl=trusted, server_hostname=NAME, origin=origin,
            additional_headers={"Cookie": session}, open_timeout=WAIT_LIMIT, compression=None,
        )  # fmt: skip

    with open_socket(f"https://{NAME}") as opened:
        assert json.loads(opened.recv(WAIT_LIMIT)) | {"connection": ""} == {
            "type": "welcome", "connection": "", "controls": True,
        }  # fmt: skip
    with pytest.raises(InvalidStatus):
        open_socket("https://evil.example")


def log_in(nginx, name, password, **headers):
    token = "t" * 32
    form = f"csrfmiddlewaretoken={token}&username={name}&password={password}".encode()
    kind = "application/x-www-form-urlencoded"
    return nginx(
        "POST", "/admin/login/", form, Cookie=f"csrftoken={token}", Content_Type=kind,
        Referer=f"https://{NAME}/admin/login/", **headers,
    )  # fmt: skip


def open_session(nginx, name, *, superuser):
    """Store a user, log in, and return the cookie of the session."""
    password = PBKDF2PasswordHasher().encode("right", "salt" * 4)  # as production hashes, not as tests do
    User.objects.create(username=name, password=password, is_staff=True, is_superuser=superuser)
    cookie = eventually(lambda: log_in(nginx, name, "right").headers.get("Set-Cookie"))
    return f"sessionid={cookie.partition('sessionid=')[2].partition(';')[0]}"


def test_nginx_counts_logins_by_address_and_limits_rate(nginx):
    User.objects.create_superuser("ann", password="right")
    # nginx may still refuse logins because of earlier tests: it lets 20 a minute through.
    eventually(lambda: log_in(nginx, "ann", "wrong", X_Forwarded_For="6.6.6.6").status == 200)
    assert FailedLogin.objects.exclude(address="*").get().address == "127.0.0.1"
    statuses = run_concurrently(40, lambda _: nginx("POST", "/admin/login/", b"").status)
    assert 429 in statuses
    # Each start at the provider without a login asks the provider and stores a session. Here, none is set.
    statuses = run_concurrently(40, lambda _: nginx("GET", "/admin/login/provider/").status)
    assert {429, 404} <= set(statuses)
    assert nginx("GET", "/admin/login/").status == 200
