"""Prompts computed in chunks that meet an ITL SLO give the tokens of transformers.generate."""

import pytest

from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.core.step_time_model import MIN_PROMPT_TOKENS, size_class
from tests.engine.conftest import References
from tests.engine.driving import make_engine, make_work, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_prompts_beside_answers_with_an_itl_slo(
    family: str, is_ahead: bool, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = references(family)
    plans: list[ScheduledBatch] = []
    with make_engine(reference.folder, async_scheduling=is_ahead) as engine:
        schedule = engine._scheduler.schedule

        def seen(now: float) -> ScheduledBatch:
            plans.append(schedule(now))
            return plans[-1]

        monkeypatch.setattr(engine._scheduler, "schedule", seen)
        never = 1e-9
        for number, prompt in enumerate(reference.prompts):
            engine.add(make_work(engine, str(number), prompt, itl_s=never))
            if number == 0:
                engine.step()
        assert engine.stats().spare_tokens_per_s == 0.0
        answers = run(engine)
        assert engine.stats().spare_tokens_per_s > 0.0, "nobody writes"
    first, *others = [answers[str(number), 0] for number in range(len(reference.prompts))]
    assert others == reference.answers[1:]
    assert first == reference.answers[0][-len(first) :]
    beside = [plan for plan in plans if any(chunk.length == 1 for chunk in plan.chunks)]
    chunks = [sum(chunk.length for chunk in plan.chunks if chunk.length > 1) for plan in beside]
    assert max(chunks) == size_class(1 + MIN_PROMPT_TOKENS) - 1
