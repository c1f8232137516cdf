"""curl, as the examples of the documents use it."""

import json
import subprocess

from asked import ASKED, PICTURE_TURNS, TOO_HOT, TURNS, found, tell


def curl(path, body, *flags, key=ASKED.key):
    command = ["curl", "-sS", f"{ASKED.url}{path}", "-H", "Content-Type: application/json"]
    command += ["-H", f"Authorization: Bearer {key}", "-d", json.dumps(body), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def chat(turns, **more):
    return {
        "model": ASKED.model,
        "messages": turns,
        "temperature": 0,
        "max_tokens": ASKED.tokens,
        **more,
    }


PATH = "/v1/chat/completions"
reply = json.loads(curl(PATH, chat(TURNS)))
found("chat", "whole", reply["choices"][0]["message"]["content"])
stream = curl(PATH, chat(TURNS, stream=True), "-N")
events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
assert events.pop() == "[DONE]"
deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
found("chat", "stream", "".join(delta.get("content") or "" for delta in deltas))
reply = json.loads(curl(PATH, chat(PICTURE_TURNS)))
found("picture", "whole", reply["choices"][0]["message"]["content"])
lines = curl(
    "/api/chat",
    {
        "model": ASKED.model,
        "messages": TURNS,
        "options": {"temperature": 0, "num_predict": ASKED.tokens},
    },
)
found(
    "chat", "ollama", "".join(json.loads(line)["message"]["content"] for line in lines.splitlines())
)
found("refused", "whole", curl(PATH, chat(TURNS, temperature=TOO_HOT)))
found("denied", "whole", curl(PATH, chat(TURNS), key="wrong"))
tell()
