"""Two answers at once, as they come; the second one is ended early."""

import asyncio

from tessera import AsyncEngine, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


async def ask(engine: AsyncEngine, prompt: str, name: str, most: int) -> None:
    """Prints an answer's text so far, and aborts it after so many tokens."""
    async for output in engine.generate(prompt, PARAMS, request_id=name):
        answer = output.outputs[0]
        print(f"{name}: {answer.text!r} {answer.finish_reason or ''}")
        if len(answer.token_ids) >= most:
            await engine.abort(name)


async def main(engine: AsyncEngine) -> None:
    """Both at once."""
    await asyncio.gather(
        ask(engine, "There is a red", "whole", PARAMS.max_tokens or 0),
        ask(engine, "The blue circle", "ended early", 5),
    )


if __name__ == "__main__":
    with AsyncEngine() as running:
        asyncio.run(main(running))
