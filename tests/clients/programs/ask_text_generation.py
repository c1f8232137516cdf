"""TGI's client."""

from asked import ASKED, ENOUGH, SCHEMA, TOO_HOT, TURNS, error_of, found, tell
from text_generation import Client
from text_generation.types import Grammar, GrammarType, Message

client = Client(ASKED.url, headers={"Authorization": f"Bearer {ASKED.key}"}, timeout=120)
count = {"max_new_tokens": ASKED.tokens}
found("text", "whole", client.generate(ASKED.question, **count).generated_text)
events = list(client.generate_stream(ASKED.question, **count))
found("text", "stream", events[-1].generated_text)
found("text", "pieces", "".join(e.token.text for e in events if not e.token.special))
picture = f"![]({ASKED.picture}){ASKED.question}"
found("text_with_picture", "whole", client.generate(picture, **count).generated_text)
turns = [Message(**turn) for turn in TURNS]
answer = client.chat(turns, max_tokens=ASKED.tokens, temperature=1e-6)
found("chat", "chat", answer.choices[0].message.content)
grammar = Grammar(type=GrammarType.Json, value=SCHEMA)
formed = client.generate(ASKED.question, max_new_tokens=ENOUGH, grammar=grammar)
found("json", "whole", formed.generated_text)
found("refused", "whole", error_of(client.generate, ASKED.question, temperature=TOO_HOT))
stream = client.generate_stream
found("refused", "stream", error_of(lambda: list(stream(ASKED.question, temperature=TOO_HOT))))
found("refused", "chat", error_of(client.chat, turns, temperature=TOO_HOT))
denied = Client(ASKED.url, headers={"Authorization": "Bearer wrong"})
found("denied", "whole", error_of(denied.generate, ASKED.question))
tell()
