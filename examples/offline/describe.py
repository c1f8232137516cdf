"""What is in a picture? Asks the demo model, or another: `python describe.py [PICTURE] [MODEL]`."""

import sys
from pathlib import Path

from tessera import LLM, SamplingParams

EXAMPLE = Path(__file__).parents[2] / "services" / "launcher" / "console" / "example.png"


def main() -> None:
    """Prints two answers about one picture."""
    picture, model = [*sys.argv[1:], *[None] * 2][:2]
    questions = ("What is in the picture?", "How many shapes are there?")
    conversations = [
        [{"role": "user", "content": [{"image": picture or EXAMPLE}, {"text": question}]}]
        for question in questions
    ]
    with LLM(model) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64))
    for question, output in zip(questions, outputs, strict=True):
        print(f"{question} {output.outputs[0].text}")


if __name__ == "__main__":
    main()
