"""PURE. The settings with which a shop's browser starts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Valid settings of one shop. An empty value leaves the choice to Chromium or to the server."""

    language: str = ""  #: BCP 47, such as zh-CN
    timezone: str = ""  #: IANA name
    window: str = ""  #: WIDTHxHEIGHT in CSS pixels
    downloads: str = ""  #: folder in the profile
    flags: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()  #: folders below the node's folder of extensions
    proxy_url: str = ""  #: http:// or socks5://, with a port
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    cdp_url: str = ""  #: http:// with a port, of a browser that runs elsewhere; the others have no effect then

    @property
    def fingerprint(self) -> str:
        """Return a text that differs for other settings. A browser with another one is replaced."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]

    @property
    def proxy_kind(self) -> str:
        return urlsplit(self.proxy_url).scheme

    @property
    def command_line(self) -> list[str]:
        """Return the flags for Chromium, without the proxy: see `proxy`."""
        flags = list(self.flags)
        if self.language:
            general = self.language.partition("-")[0]
            flags += [f"--lang={self.language}", f"--accept-lang={','.join(dict.fromkeys([self.language, general]))}"]
        if self.window:
            flags.append(f"--window-size={self.window.replace('x', ',')}")
        return flags

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of the browser's environment. Chromium on Linux reads its language there."""
        found = {"TZ": self.timezone, "LANGUAGE": self.language.replace("-", "_")}
        return {name: value for name, value in found.items() if value}
