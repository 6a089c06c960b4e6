"""How the pool comes to a browser: launch settings, the forwarder to a proxy, and the proof that it is used."""
