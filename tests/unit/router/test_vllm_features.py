"""Features that users of vLLM know, each shown by one test because no other test covers it."""

from pathlib import Path

import httpx

from baton_serve.services.common.settings.configuration import load
from baton_serve.services.router.main import with_cors
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.served_model import ServedModel
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.tokenizers_for_tests import write_folder

HELLO = [{"role": "user", "content": "hello"}]
PAGE = "https://chat.example.com"


def settings(*argv: str) -> RouterSettings:
    return load(RouterSettings, argv, {}, prefix="BATON__ROUTER__", program="baton router", description="")


def test_the_default_port_is_vllms_and_the_flags_change_the_address() -> None:
    assert settings("--model=/m").port == 8000
    chosen = settings("--model=/m", "--host=0.0.0.0", "--port=8001")
    assert (chosen.host, chosen.port) == ("0.0.0.0", 8001)


def test_the_role_of_answers_can_be_set(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body = {"messages": HELLO, "max_tokens": 2}
        answer = (await router.http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["role"] == "bot"
        first, *_ = await router.stream("/v1/chat/completions", **body)
        assert first["choices"][0]["delta"]["role"] == "bot"

    serve(scenario, response_role="bot")


def test_browsers_may_send_credentials_if_the_flag_is_set(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for flags, expected in (([], None), (["--allow-credentials"], "true")):
            chosen = settings("--model=/m", f"--allowed-origins={PAGE}", *flags)
            transport = httpx.ASGITransport(app=with_cors(router.app, chosen))
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
                answer = await http.get("/v1/models", headers={"origin": PAGE})
                assert answer.headers.get("access-control-allow-credentials") == expected

    serve(scenario)


def test_a_chat_without_a_template_is_a_bad_request(serve: Serve, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "plain", chat_template=None)
    model = ServedModel.from_settings(RouterSettings(model=str(folder)))

    async def scenario(router: Router) -> None:
        router.service.model = model
        answer = await router.http.post("/v1/chat/completions", json={"messages": HELLO})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "no_chat_template", "messages")

    serve(scenario)


def test_lengths_and_parameters_of_requests_are_histograms_of_vllm_s_names(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(prompt=[104] * 10, max_tokens=6, n=2, best_of=3)
        await router.http.get("/metrics")
        sums = {
            "vllm:request_prompt_tokens": 10,
            "vllm:request_generation_tokens": 3 * 6,
            "vllm:request_max_num_generation_tokens": 6,
            "vllm:request_params_n": 2,
            "vllm:request_params_best_of": 3,
            "vllm:request_params_max_tokens": 6,
        }
        value = router.metrics.registry.get_sample_value
        for name, total in sums.items():
            assert value(f"{name}_sum", {"model_name": "tiny"}) == total, name
            assert value(f"{name}_count", {"model_name": "tiny"}) == 1, name

    serve(scenario)
