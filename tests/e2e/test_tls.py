"""`baton router` behind its own certificate: asked through TLS, and not without."""

import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from baton_serve.bench.ports import free_port
from tests.e2e.cluster import ROOT, baton, environment, wait_until

pytestmark = pytest.mark.slow


def test_the_router_answers_over_tls_alone(llama: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "tls.key", tmp_path / "tls.crt"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", str(key), "-out", str(certificate), *subject]
    subprocess.run(made, check=True, capture_output=True)
    port = free_port()
    command = baton("router", "--model", str(llama), "--port", str(port), "--registry", f"memory://{tmp_path}/registry")
    command += ["--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--instance-wait-s", "0.1"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
    trusted = ssl.create_default_context(cafile=str(certificate))
    try:
        with httpx.Client(verify=trusted, base_url=f"https://127.0.0.1:{port}") as client:

            def answers() -> bool:
                try:
                    return client.get("/version").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(answers, timeout_s=60, what="a router that answers over TLS")
            assert client.get("/metrics").text.count("vllm:") > 10
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/version")
    finally:
        process.terminate()
        assert process.wait(30) == 0
